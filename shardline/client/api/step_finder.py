"""Which step or batch comes next, by the chief's orders and by what became of the one before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shardline.client.api.leases import WorkerLeases
from shardline.client.api.pipeline import Pipeline
from shardline.client.api.workplace import Workplace
from shardline.client.exchange.outcomes import Interrupted, Restart, StepFigures, Stopped
from shardline.client.step.retained_contribution import RetainedContribution
from shardline.client.step.trainer import Trainer
from shardline.client.unstepped import Unstepped, waiting_replicas
from shardline.consistency import Consistency
from shardline.core.orders import LOST, REPEATED, Orders, Phase
from shardline.core.timeouts import Timeouts
from shardline.errors import RolledBackError, UnreachableError, UsageError
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")


class StepFinder:
    """One worker's way through the steps of a job. Used by the session's thread, but for ordered().

    leaving: whether this worker was asked to go.
    """

    def __init__(
        self, timeouts: Timeouts, place: Workplace, pipeline: Pipeline, *, leaving: Callable[[], bool]
    ) -> None:
        self._timeouts = timeouts
        self._place = place
        self._pipeline = pipeline
        self._leaving = leaving
        self._link: ChiefLink | None = None
        self.assigned: tuple[int, ...] = ()
        """Replicas of this worker, by the orders that the open step began with."""
        self.todo: set[int] = set()
        """Replicas that still have to contribute to the open step."""
        self.stale = True
        """The next step begins with Progress."""
        self.iterating = False
        """Within a loop over steps(), which can be made to run a step again."""
        self.retained: RetainedContribution | None = None
        """What a loop that can't be made to do so has contributed to the open step."""
        self.closed_by: StepFigures | None = None
        """Set by go_on() where the open step needs no exchange any more: all shards have its contribution."""
        self.leases = WorkerLeases()
        self.unstepped = Unstepped(timeouts.total_s)
        self._finished = False
        self._repeated = 0
        """Asynchronous mode: batches that were sent and had to be computed again."""

    def follow(self, link: ChiefLink) -> None:
        """Take orders from this chief."""
        self._link = link

    @property
    def link(self) -> ChiefLink:
        """Tie to the chief; raises UsageError before attach()."""
        if self._link is None:
            raise UsageError("the session is not attached yet: call session.attach(model, optimizer) first")
        return self._link

    @property
    def _trainer(self) -> Trainer:
        return self._place.trainer

    @property
    def _mode(self) -> Consistency:
        return self._place.trainer.methods.mode

    @property
    def number(self) -> int:
        """Number of the open tick: of the step, or of the batch that is leased."""
        return self._trainer.methods.ticks.number(self.leases.batch if self.leases.held else self._trainer.step)

    def ordered(self, orders: Orders) -> None:
        """Called on the heartbeat thread."""
        trainer, link, view = self._place.current, self._link, self._place.view
        if trainer is None or link is None or view is None:
            return
        moved = trainer.methods.mode.assigns_replicas and self.assigned and orders.replicas != self.assigned
        if orders.fenced or link.lost or moved or orders.timeline != view.timeline or orders.phase is Phase.ENDED:
            trainer.exchange.interrupt()

    def still_ordered(self) -> bool:
        """Whether the orders are still those that the open step began with."""
        orders = self.link.orders
        if orders.fenced or self.link.lost is not None or orders.phase is Phase.ENDED or self._place.view is None:
            return False
        moves = self._mode.assigns_replicas and self.iterating
        return orders.timeline == self._place.view.timeline and not (moves and orders.replicas != self.assigned)

    def next(self) -> int | None:
        """Number of the next step or batch, None when there is none; waits while there may be one later.

        Raises JobError where the step before was begun and not ended, see Trainer.check_stepped, or where other
        workers wait for it, see Unstepped.
        """
        while True:
            link = self.link
            if self._pipeline.rewind():
                self.stale = True
                self.unstepped.reset()
            self._trainer.check_stepped()
            number = self._next_while_sending()
            if number is not None:
                return self._begin(number)
            if not self._pipeline.settle():
                continue
            # Before the orders are read: an interruption by newer ones must not be forgotten.
            self._trainer.exchange.arm()
            orders = self._orders_or_none()
            if orders is None or orders.phase is Phase.ENDED:
                return None
            if orders.phase not in (Phase.RUNNING, Phase.STOPPING):
                self._wait_for_change(orders)
                continue
            if self._is_another_history(orders):
                self.stale = True
                if self._finished:
                    # What was the end is ahead again.
                    self._finished = False
                    link.resume()
            if self._mode.assigns_replicas:
                number = self._next_assigned(orders)
            elif self._trainer.job.script:
                if self.stale and not self.relocate(orders):
                    continue
                self.todo = {0}
                number = self._trainer.step
            else:
                number = self._next_lease(orders)
            if number is not None:
                return self._begin(number)

    def _begin(self, number: int) -> int:
        """A pass of the loop's body begins."""
        self.link.set_step(number)
        now_s = time.monotonic()
        if self.unstepped.begin(number, now_s):
            self.unstepped.waited_for(number, waiting_replicas(self._trainer, self.assigned), now_s)
        return number

    def _is_another_history(self, orders: Orders) -> bool:
        return self._place.view is not None and orders.timeline != self._place.view.timeline

    def _orders_or_none(self) -> Orders | None:
        """Orders in force; None where this worker is leaving and has been let go."""
        link = self.link
        if self._leaving() and (link.orders.fenced or not link.orders.replicas):
            return None
        link.check()
        return link.orders

    def _wait_for_change(self, seen: Orders) -> None:
        self.link.wait(lambda o: o != seen or o.fenced, timeout_s=self._timeouts.heartbeat_s * 4)

    def _next_assigned(self, orders: Orders) -> int | None:
        if not orders.replicas:
            # A spare: nothing to do until somebody's replicas come here.
            self.assigned, self.stale = (), True
            self._wait_for_change(orders)
            return None
        if self.stale or orders.replicas != self.assigned:
            if not self.relocate(orders):
                return None
        elif not self.todo:
            self.todo = set(self.assigned)
        if orders.stop_step and self._trainer.step >= orders.stop_step:
            self.finish_part()
            self._wait_for_change(orders)
            return None
        return self._trainer.step

    def relocate(self, orders: Orders) -> bool:
        """Ask Progress and pull that step; False where it has to be tried again."""
        self.assigned = orders.replicas
        try:
            self._place.renew(self.link)
            if self.link.orders != orders:
                # Nobody could interrupt a trainer that was not there yet.
                return False
            self.todo = self._trainer.locate(orders.replicas, orders.timeline)
        except (Restart, Interrupted) as error:
            log.info("finding the step again: %s", error or "interrupted")
            self._wait_for_change(orders)
            return False
        except Stopped as error:
            # These replicas are counted in the last step that there is, or the job ends where it stands.
            log.info("%s", error)
            self._wait_for_change(orders)
            return False
        except UnreachableError as error:
            # The chief knows better whether that ps is dead; it ends the job or tells where its shards are now.
            log.warning("%s", error)
            self._wait_for_change(orders)
            return False
        self.stale = False
        self.unstepped.reset()
        self._tell_figures()
        self.link.set_step(self._trainer.step)
        return True

    def _tell_figures(self) -> None:
        self.link.figures = {LOST: float(self._place.lost_updates), REPEATED: float(self._repeated)}

    def _next_lease(self, orders: Orders) -> int | None:
        if self._finished:
            self._wait_for_change(orders)
            return None
        if self.stale and not self.relocate(orders):
            return None
        if not self.leases.has_next:
            if self._leaving():
                self._wait_for_change(orders)
                return None
            lease = self.leases.renew(self.link)
            if lease.count == 0:
                if lease.ended:
                    self.finish_part()
                self.link.wait(lambda o: o.phase is Phase.ENDED, timeout_s=lease.retry_after_s or 0.05)
                return None
        self.todo = {0}
        return self.leases.batch

    def finish_part(self) -> None:
        """Tell the chief, once, that this worker has done its part."""
        if not self._finished:
            self._finished = True
            self.link.finish()

    def _next_while_sending(self) -> int | None:
        """Number of the step to begin although the one before is not closed; None where nothing or all has to wait."""
        if not self._pipeline.healthy or self.unstepped.passes:
            return None
        orders = self._orders_or_none()
        if orders is None or orders.phase not in (Phase.RUNNING, Phase.STOPPING) or self._is_another_history(orders):
            return None
        if self._mode.leases_batches:
            return self.leases.batch if self.leases.has_next else None
        if orders.stop_step and self._trainer.step >= orders.stop_step:
            return None
        return self._trainer.step

    def go_on(self, error: Exception) -> bool:
        """After an exchange that didn't end: True = send the same again, False = the loop starts over.

        Raises RolledBackError where the loop can't start over and the job went back.
        """
        link = self.link
        self.closed_by = None
        orders = self._orders_or_none()
        if orders is None or orders.phase is Phase.ENDED:
            self.stale = True
            self._lose_sent()
            return False
        if isinstance(error, Stopped):
            log.info("%s", error)
            self.stale = True
            self._lose_sent()
            if self._mode.leases_batches:
                self.finish_part()
            self._wait_for_change(orders)
            return False
        assert self._place.view is not None
        if orders.timeline == self._place.view.timeline and (self._mode.leases_batches or not self.iterating):
            # Sending again is harmless: what counted is a duplicate.
            if not isinstance(error, Interrupted):
                link.wait(lambda o: o != orders, timeout_s=0.1)
            self._trainer.exchange.arm()
            # Orders that came before arm() are looked at here, later ones interrupt again.
            if self.still_ordered():
                return True
        if not self.iterating:
            return self._carry_over()
        log.info("starting the step again: %s", error or "orders changed")
        self.stale = True
        self._lose_sent()
        return False

    def _carry_over(self) -> bool:
        """Another timeline under a loop that can't run its step again: what it contributed is taken along into it.

        True = it is to be sent again, or closed_by says that it counts already; False = the job has ended. A server
        that a standby stands in for makes a timeline in which nothing went back; of any other this raises
        RolledBackError, with the parameters of the step where the job stands in the model.
        """
        retained = self.retained
        if retained is None:
            # attach(job=...) and no loop over steps(): it runs ahead of what it has sent, and holds nothing of it.
            unbegun = (Phase.WAITING, Phase.INIT)
            self.link.wait(lambda o: o.fenced or o.phase not in unbegun, timeout_s=self._timeouts.lost_s)
            if self.link.orders.phase is not Phase.ENDED:
                self.link.check()
                raise self._rolled_back(self.link.orders.first_step)
            self.stale = True
            self._lose_sent()
            return False
        retained.keep(self._trainer, shared=self._place.zero_copy)
        self.stale = True
        self._lose_sent()
        while self.stale:
            # Before the orders are read, see next().
            self._trainer.exchange.arm()
            orders = self._orders_or_none()
            if orders is None or orders.phase is Phase.ENDED:
                return False
            begun = orders.phase in (Phase.RUNNING, Phase.STOPPING)
            if not begun or (self._mode.assigns_replicas and not orders.replicas):
                self._wait_for_change(orders)
            else:
                self.relocate(orders)
        trainer = self._trainer
        if retained.went_back(trainer.half):
            raise self._rolled_back(trainer.step if self._mode.consistent_cuts else self.link.orders.first_step)
        if retained.counted(trainer.half):
            self.closed_by = retained.accept(trainer.half)
        else:
            retained.contribute(trainer)
        return True

    def _rolled_back(self, step: int) -> RolledBackError:
        """What a loop that can't be made to run a step again is told. step: where the job stands."""
        return RolledBackError(
            f"{self.link.task}: a parameter server was lost, and the job went back to step {step}; loop over "
            "session.steps() to follow it, or train with --standbys 1",
            step=step,
        )

    def _lose_sent(self) -> None:
        """What is on its way has to be computed again."""
        sent = self._pipeline.lose()
        if sent is not None:
            # Some shards may have applied it already.
            self._repeated += self._mode.leases_batches
            self.leases.batch = sent.batch

    def advance(self) -> None:
        """A step has been sent: what comes is the next one's."""
        self.todo = set(self.assigned) if self._mode.assigns_replicas else {0}
        if self.leases.held:
            self.leases.batch += 1
        self.link.set_step(self._trainer.step)
