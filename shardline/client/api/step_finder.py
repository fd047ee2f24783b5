"""Decides which step or batch comes next, from the chief's orders and the outcome of the previous one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardline.client.api.in_flight import InFlight
from shardline.client.api.workplace import Workplace
from shardline.client.exchange.outcomes import Interrupted, Overtaken, Restart, StepFigures, Stopped
from shardline.client.step.retained_contribution import RetainedContribution
from shardline.client.step.trainer import Trainer
from shardline.client.unstepped import Unstepped, waiting_replicas
from shardline.consistency import Consistency
from shardline.core.orders import LOST, REPEATED, Orders, Phase
from shardline.core.settings import EXACT
from shardline.core.timeouts import Timeouts
from shardline.errors import RolledBackError, UnreachableError, UsageError
from shardline.host.awake import awake_s
from shardline.rpc.client import Lease
from shardline.rpc.link import ChiefLink


class WorkerLeases:
    """One worker's lease. `batch` is the number of the next batch to compute."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self.batch = 0

    @property
    def held(self) -> bool:
        """Whether a lease is held, finished or not."""
        return self._lease is not None

    @property
    def has_next(self) -> bool:
        return self._lease is not None and self.batch < self._lease.first + self._lease.count

    @property
    def end(self) -> int | None:
        """First batch after the lease; None without one."""
        return self._lease.first + self._lease.count if self._lease is not None else None

    def renew(self, link: ChiefLink) -> Lease:
        """Report the current lease as done and ask for the next, which may be empty. All its pushes are acknowledged.

        Waits while the chief is away. Raises the same errors as ChiefLink.ask.
        """
        done = [self._lease.number] if self._lease is not None else []
        try:
            lease = link.ask(lambda: link.client.lease(link.identity, done))
        except UnreachableError:
            if link.orders.phase is not Phase.ENDED:
                raise
            # The chief announced the end and exited.
            lease = Lease(number=0, first=0, count=0, ended=True)
        self.batch = lease.first
        self._lease = lease if lease.count else None
        return lease


log = logging.getLogger("shardline.client")


class StepFinder:
    """Finds one worker's steps. Used by the session's thread, except ordered().

    leaving: whether this worker was asked to leave.
    """

    def __init__(
        self, timeouts: Timeouts, place: Workplace, in_flight: InFlight, *, leaving: Callable[[], bool]
    ) -> None:
        self._timeouts = timeouts
        self._place = place
        self._in_flight = in_flight
        self._leaving = leaving
        self._link: ChiefLink | None = None
        self.begun = Orders()
        """The orders that the open step began with; `replicas` are this worker's."""
        self.todo: set[int] = set()
        """Replicas that still have to contribute to the open step."""
        self.stale = True
        """The next step begins by asking for Progress."""
        self.iterating = False
        """Inside a loop over steps(), which can repeat a step."""
        self.retained: RetainedContribution | None = None
        """The contribution to the open step of a loop that can't repeat a step."""
        self.closed_by: StepFigures | None = None
        """Set by go_on() if the open step needs no further exchange: all shards have its contribution."""
        self.leases = WorkerLeases()
        self.unstepped = Unstepped(timeouts.total_s)
        self._finished = False
        self._repeated = 0
        """Asynchronous mode: batches that were sent but had to be computed again."""

    def follow(self, link: ChiefLink) -> None:
        self._link = link

    @property
    def link(self) -> ChiefLink:
        """Link to the chief. Raises UsageError before attach()."""
        if self._link is None:
            raise UsageError("the session is not attached: call session.attach(model, optimizer) first")
        return self._link

    @property
    def _trainer(self) -> Trainer:
        return self._place.trainer

    @property
    def _mode(self) -> Consistency:
        return self._place.trainer.methods.mode

    @property
    def number(self) -> int:
        """Number of the open tick: from the step, or from the leased batch."""
        return self._trainer.methods.ticks.number(self.leases.batch if self.leases.held else self._trainer.step)

    def ordered(self, orders: Orders) -> None:
        """Interrupt the exchange if new orders end it. Called on the heartbeat thread."""
        trainer, link, view = self._place.current, self._link, self._place.view
        if trainer is None or link is None or view is None:
            return
        moved = trainer.methods.mode.assigns_replicas and self.begun.replicas and orders.work != self.begun.work
        if orders.fenced or link.lost or moved or orders.timeline != view.timeline or orders.phase is Phase.ENDED:
            self._place.interrupt()

    def still_ordered(self) -> bool:
        """Whether the orders are still those that the open step began with."""
        orders = self.link.orders
        if orders.fenced or self.link.lost is not None or orders.phase is Phase.ENDED or self._place.view is None:
            return False
        moves = self._mode.assigns_replicas and self.iterating
        return orders.timeline == self._place.view.timeline and not (moves and orders.work != self.begun.work)

    def next(self) -> int | None:
        """Number of the next step or batch, None if there is none; waits while there may be one later.

        Raises JobError if the previous step was begun and not ended, see Trainer.check_stepped, or if other workers
        wait for it, see Unstepped.
        """
        while True:
            link = self.link
            if self._in_flight.rewind():
                self.stale = True
                self.unstepped.reset()
            self._trainer.check_stepped()
            number = self._next_while_sending()
            if number is not None:
                return self._begin(number)
            if not self._in_flight.settle():
                continue
            # Before reading the orders: an interruption by newer ones must not be lost.
            self._place.arm()
            orders = self._orders_or_none()
            if orders is None or orders.phase is Phase.ENDED:
                return None
            if orders.phase not in (Phase.RUNNING, Phase.STOPPING):
                self._wait_for_change(orders)
                continue
            if self._is_another_history(orders):
                self.stale = True
                if self._finished:
                    # The job went back behind its end.
                    self._finished = False
                    link.resume()
            if self._mode.assigns_replicas:
                number = self._next_assigned(orders)
            elif self._trainer.job.script:
                if (self.stale or self._place.resting) and not self.relocate(orders):
                    continue
                self.todo = {0}
                number = self._trainer.step
            else:
                number = self._next_lease(orders)
            if number is not None:
                return self._begin(number)

    def _begin(self, number: int) -> int:
        """Begin a pass of the loop's body."""
        self._place.office.begin(self._trainer.job, self.begun, self._trainer.step, self.link.identity)
        self.link.set_step(number)
        now_s = awake_s()
        if self.unstepped.begin(number, now_s):
            self.unstepped.waited_for(number, waiting_replicas(self._trainer, self.begun.replicas), now_s)
        return number

    def _is_another_history(self, orders: Orders) -> bool:
        return self._place.view is not None and orders.timeline != self._place.view.timeline

    def _orders_or_none(self) -> Orders | None:
        """Current orders; None if this worker is leaving and has been released."""
        link = self.link
        if self._leaving() and self._trainer.job.error_memory != EXACT:
            self._trainer.encoders.leaving = True
        if self._leaving() and (link.orders.fenced or not link.orders.replicas):
            return None
        link.check()
        return link.orders

    def _wait_for_change(self, seen: Orders) -> None:
        self.link.wait(lambda o: o != seen or o.fenced, timeout_s=self._timeouts.heartbeat_s * 4)

    def _next_assigned(self, orders: Orders) -> int | None:
        if not orders.replicas:
            # A spare worker: nothing to do until replicas are assigned to it.
            self.begun, self.stale = orders, True
            self._wait_for_change(orders)
            return None
        if self.stale or orders.work != self.begun.work:
            if not self.relocate(orders):
                return None
        elif not self.todo:
            self.todo = set(self.begun.replicas)
        if orders.stop_step and self._trainer.half.job_step >= orders.stop_step:
            self.finish_part()
            self._wait_for_change(orders)
            return None
        return self._trainer.step

    def relocate(self, orders: Orders) -> bool:
        """Ask for Progress and pull the parameters of that step; False if this has to be tried again."""
        self.begun, self.stale = orders, True
        try:
            self._place.renew(self.link)
            if self.link.orders != orders:
                # The new trainer did not exist when these orders came, so they could not interrupt it.
                return False
            self.todo = self._trainer.locate(orders.units(self.link.task), orders.timeline, orders.posts)
        except (Restart, Interrupted, Stopped, UnreachableError) as error:
            # Stopped: these replicas are counted in the last step, or the job ends at its current step. A ps that can't
            # be reached: the chief decides whether it is dead; it ends the job or announces where its shards are now.
            level = logging.WARNING if isinstance(error, UnreachableError) else logging.INFO
            log.log(level, "looking for the current step again: %s", error or "interrupted")
            if not isinstance(error, Overtaken):
                self._wait_for_change(orders)
            return False
        self.stale = False
        self.unstepped.reset()
        self.link.figures = {LOST: float(self._place.lost_updates), REPEATED: float(self._repeated)}
        self.link.set_step(self._trainer.step)
        return True

    def _next_lease(self, orders: Orders) -> int | None:
        if self._finished or (self._leaving() and not self.leases.has_next):
            self._place.rest()
            self._wait_for_change(orders)
            return None
        if self.stale and not self.relocate(orders):
            return None
        if not self.leases.has_next:
            lease = self.leases.renew(self.link)
            if lease.count == 0:
                self._place.rest()
                if lease.ended:
                    self.finish_part()
                self.link.wait(lambda o: o.phase is Phase.ENDED, timeout_s=lease.retry_after_s or 0.05)
                return None
        if self._place.resting and not self.relocate(orders):
            return None
        self.todo = {0}
        return self.leases.batch

    def finish_part(self) -> None:
        """Report to the chief, once, that this worker has done its part."""
        again, self._finished = self._finished, True
        self._place.finish(self.link, again=again)

    def _next_while_sending(self) -> int | None:
        """Number of the step to begin while the previous one is still open; None if it has to be closed first."""
        if not self._in_flight.healthy or self.unstepped.passes:
            return None
        orders = self._orders_or_none()
        if orders is None or orders.phase not in (Phase.RUNNING, Phase.STOPPING) or self._is_another_history(orders):
            return None
        if self._mode.leases_batches:
            return self.leases.batch if self.leases.has_next else None
        if orders.stop_step and self._trainer.half.job_step >= orders.stop_step:
            return None
        return self._trainer.step

    def go_on(self, error: Exception) -> bool:
        """Decide after a failed exchange: True = send the same again, False = the loop starts over.

        Raises RolledBackError if the job rolled back and the loop can't start over.
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
        again = self._mode.leases_batches or not self.iterating or self._trainer.methods.resends
        if orders.timeline == self._place.view.timeline and again and not isinstance(error, Overtaken):
            # Sending again is harmless: what was counted is a duplicate.
            if not isinstance(error, Interrupted):
                link.wait(lambda o: o != orders, timeout_s=0.1)
            self._trainer.exchange.arm()
            # Check orders that came before arm(); later ones interrupt again.
            if self.still_ordered():
                return True
        if isinstance(error, Overtaken) and not self.iterating and self.retained is None:
            # Its step is closed without it. Nothing has to be sent again.
            self._lose_sent()
            self.find_again()
            return False
        if not self.iterating:
            return self._carry_over()
        log.info("restarting the step: %s", error or "orders changed")
        self.stale = True
        self._lose_sent()
        return False

    def _carry_over(self) -> bool:
        """Move the contribution of a loop that can't repeat its step into another timeline.

        True = send it again, or closed_by shows that it is already counted; False = the job has ended. When a standby
        replaces a server, the new timeline continues without going back. Otherwise raises RolledBackError, with the
        parameters of the job's current step in the model.
        """
        retained = self.retained
        if retained is None:
            # attach(job=...) without a loop over steps(): it runs ahead of what it has sent and retains nothing.
            unbegun = (Phase.WAITING, Phase.INIT)
            self.link.wait(lambda o: o.fenced or o.phase not in unbegun, timeout_s=self._timeouts.lost_s)
            if self.link.orders.phase is not Phase.ENDED:
                self.link.check()
                raise rolled_back(self.link.task, self.link.orders.first_step)
            self.stale = True
            self._lose_sent()
            return False
        retained.keep(self._trainer, shared=self._place.zero_copy)
        self._lose_sent()
        if not self.find_again():
            return False
        trainer = self._trainer
        if retained.went_back(trainer.half):
            raise rolled_back(
                self.link.task, trainer.step if self._mode.consistent_cuts else self.link.orders.first_step
            )
        if retained.counted(trainer.half):
            self.closed_by = retained.accept(trainer.half)
        else:
            retained.contribute(trainer)
        return True

    def find_again(self) -> bool:
        """Wait until the job's current step is found and its parameters are in the model; False if the job ends."""
        self.stale = True
        while self.stale:
            # Before reading the orders, see next().
            self._trainer.exchange.arm()
            orders = self._orders_or_none()
            if orders is None or orders.phase is Phase.ENDED:
                return False
            begun = orders.phase in (Phase.RUNNING, Phase.STOPPING)
            if not begun or (self._mode.assigns_replicas and not orders.replicas):
                self._wait_for_change(orders)
            else:
                self.relocate(orders)
        return True

    def _lose_sent(self) -> None:
        """Give up the step in flight, which has to be computed again."""
        sent = self._in_flight.lose()
        if sent is not None:
            # Some shards may already have applied it.
            self._repeated += self._mode.leases_batches
            self.leases.batch = sent.batch

    def advance(self) -> None:
        self.todo = set(self.begun.replicas) if self._mode.assigns_replicas else {0}
        if self.leases.held:
            self.leases.batch += 1
        self.link.set_step(self._trainer.step)


def rolled_back(task: str, step: int) -> RolledBackError:
    """The error for a loop that can't repeat a step. step: the job's current step."""
    return RolledBackError(
        f"{task}: a parameter server was lost, and the job was rolled back to step {step}; loop over session.steps() "
        "to follow it, or train with --standbys 1",
        step=step,
    )
