"""Where a worker stands: its link to the chief, its connections to the servers, its position in the job's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardline.client.api.stepper import Seen, Stepper
from shardline.client.api.workplace import Workplace
from shardline.client.exchange.outcomes import Interrupted, Restart
from shardline.client.step.retained_contribution import RetainedContribution
from shardline.client.step.trainer import Trainer
from shardline.config import RoleConfig
from shardline.core.orders import Orders
from shardline.core.settings import EXACT
from shardline.errors import UnreachableError, UsageError
from shardline.observability.metrics import Metrics
from shardline.pipeline.parcel import ParcelKey
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")


class WorkerState:
    """What a worker's loop looks at before it decides. Used by the session's thread, except ordered().

    leaving: whether this worker was asked to leave. settle: see PostOffice.
    """

    def __init__(
        self, config: RoleConfig, metrics: Metrics, *, leaving: Callable[[], bool], settle: Callable[[], None]
    ) -> None:
        self._leaving = leaving
        self.stepper = Stepper()
        self.place = Workplace(
            config, metrics, still_ordered=self.still_ordered, still_open=self.still_open, settle=settle
        )
        self.joined: ChiefLink | None = None
        """The link to the chief, from attach() on."""
        self.retained: RetainedContribution | None = None
        """The contribution to the open step of a loop that can't repeat a step."""

    @property
    def link(self) -> ChiefLink:
        """Link to the chief. Raises UsageError before attach()."""
        if self.joined is None:
            raise UsageError("the session is not attached: call session.attach(model, optimizer) first")
        return self.joined

    @property
    def trainer(self) -> Trainer:
        """State of training. Raises UsageError before attach()."""
        return self.place.trainer

    @property
    def assigned(self) -> bool:
        """Whether the chief assigns logical replicas to this worker."""
        return self.trainer.half.shares_steps

    @property
    def number(self) -> int:
        """Number of the open step, or of the leased batch."""
        leases = self.stepper.leases
        return self.trainer.step if leases.lease is None else leases.batch

    def see(self) -> Seen:
        """What to decide on. Raises the error of a worker that may not go on, see ChiefLink.check."""
        link, trainer = self.link, self.trainer
        leaving = self._leaving()
        if leaving and trainer.job.error_memory != EXACT:
            trainer.encoders.leaving = True
        released = leaving and (link.orders.fenced or not link.orders.replicas)
        if not released:
            link.check()
        return Seen(
            orders=link.orders,
            released=released,
            leaving=leaving,
            timeline=self.place.timeline,
            job_step=trainer.half.job_step,
            assigned=self.assigned,
            script=trainer.job.script,
            resting=self.place.resting,
            resends=trainer.methods.resends,
            retained=self.retained is not None,
        )

    def ordered(self, orders: Orders) -> None:
        """Interrupt the exchange if new orders end it. Called on the heartbeat thread."""
        trainer, link, timeline = self.place.current, self.joined, self.place.timeline
        if trainer is None or link is None or timeline is None:
            return
        assigned = trainer.half.shares_steps
        if link.lost or self.stepper.interrupts(orders, timeline, assigned=assigned):
            self.place.interrupt()

    def still_ordered(self) -> bool:
        """Whether the orders are still those that the open step began with."""
        link, timeline = self.link, self.place.timeline
        if link.lost is not None or timeline is None:
            return False
        return self.stepper.still_ordered(link.orders, timeline, assigned=self.assigned)

    def still_open(self, key: ParcelKey) -> bool:
        """Whether a step still has to be computed, by the orders that it began with."""
        if not self.still_ordered() or self.trainer.methods.unbroken:
            # Without a flush stages are at different steps, and whatever ends one of them changes the orders.
            return self.still_ordered()
        try:
            found = self.trainer.standings(range(self.trainer.job.replicas)).values()
        except UnreachableError as error:
            # Beginning again would not help: the other stages do so only if the orders change.
            log.info("can't ask whether step %d is closed: %s", key.step, error)
            return self.still_ordered()
        except (Restart, Interrupted) as error:
            log.info("looking for the current step again: %s", error or "interrupted")
            return False
        return min(step for standing in found for step in standing.replicas.values()) <= key.step
