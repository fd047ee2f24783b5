"""The worker's loop as a state machine: what to do, by the chief's orders and the end of the last exchange. Pure.

`next` and `failed` get what the loop sees and return what to do; StepRunner does it.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence

from shardline.client.exchange.shard_exchange import Overtaken, Stopped
from shardline.core.fixed import fixed
from shardline.core.orders import Orders, Phase
from shardline.errors import JobError, JobStopped
from shardline.rpc.client import Lease
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")

OPEN = (Phase.RUNNING, Phase.STOPPING)
"""Phases in which steps are made."""


class Do(enum.Enum):
    """An action of the loop."""

    BEGIN = enum.auto()  # a pass of the open step
    WAIT = enum.auto()  # for other orders
    LOCATE = enum.auto()  # ask the servers for the current step, and pull its parameters
    LEASE = enum.auto()  # ask the chief for batches
    REST = enum.auto()  # tell the servers that nothing comes for a while, then wait
    RESUME = enum.auto()  # tell the chief that this worker goes on: the job went back behind the end of its part
    FINISH = enum.auto()  # tell the chief that this worker has done its part, then wait
    END = enum.auto()  # leave the loop
    RESEND = enum.auto()  # the same again, which is harmless: what was counted is a duplicate
    CARRY_OVER = enum.auto()  # locate the step, then send the contribution that was kept, unless it is counted
    CATCH_UP = enum.auto()  # the step is closed without this worker: give it up and locate the current one at once
    AGAIN = enum.auto()  # give up the step; it is located and computed again


@fixed(kw_only=True)
class Seen:
    """The facts on which the loop decides."""

    orders: Orders
    released: bool  # this worker leaves, and the chief has let it go
    leaving: bool  # it was asked to leave
    timeline: int | None  # of the trainer; None = there is none yet
    job_step: int  # steps that the job has done, as far as known
    assigned: bool  # the chief assigns replicas; False: workers push for themselves
    script: bool  # the loop is the user's own
    resting: bool  # the servers know that this worker pushes nothing
    resends: bool  # a failed exchange is repeated with the same gradients: computing them again takes other workers
    retained: bool  # a loop that can't repeat a step has kept its contribution to the open one
    rated: bool = True  # the learning rate of the next step is known

    @property
    def over(self) -> bool:
        return self.released or self.orders.phase is Phase.ENDED

    @property
    def last_done(self) -> bool:
        return 0 < self.orders.stop_step <= self.job_step


class WorkerLeases:
    """One worker's lease of batches. `batch` is the number of the next one to compute."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.batch = 0

    @property
    def has_next(self) -> bool:
        return self.lease is not None and self.batch < self.lease.first + self.lease.count

    @property
    def number(self) -> list[int]:
        return [self.lease.number] if self.lease is not None else []

    @property
    def end(self) -> int | None:
        return self.lease.first + self.lease.count if self.lease is not None else None

    def take(self, lease: Lease) -> None:
        self.batch = lease.first
        self.lease = lease if lease.count else None


class Stepper:
    """One worker's position in its job's steps."""

    def __init__(self) -> None:
        self.begun = Orders()
        """The orders that the open step began with; `replicas` are this worker's."""
        self.todo: set[int] = set()
        """Replicas that still have to contribute to the open step."""
        self.stale = True
        """The next step has to be located."""
        self.iterating = False
        """Inside a loop over steps(), which can repeat a step."""
        self.finished = False
        """The chief knows that this worker has done its part."""
        self.leases = WorkerLeases()

    def still_ordered(self, orders: Orders, timeline: int | None, *, assigned: bool) -> bool:
        """Whether the orders are still those that the open step began with."""
        if orders.fenced or orders.phase is Phase.ENDED or orders.timeline != timeline:
            return False
        return not (assigned and self.iterating) or orders.work == self.begun.work

    def interrupts(self, orders: Orders, timeline: int, *, assigned: bool) -> bool:
        """Whether these orders end the running exchange."""
        moved = assigned and bool(self.begun.replicas) and orders.work != self.begun.work
        return orders.fenced or moved or orders.timeline != timeline or orders.phase is Phase.ENDED

    def runs_on(self, seen: Seen) -> bool:
        """Whether the next step may begin while the previous one is exchanged."""
        if seen.over or seen.orders.phase not in OPEN or seen.orders.timeline != seen.timeline:
            return False
        if seen.orders.peers != self.begun.peers or not seen.rated:
            # Another way to the servers is there, or one is gone; or the step's learning rate waits for a score.
            return False
        return not seen.last_done if seen.assigned else self.leases.has_next

    def next(self, seen: Seen) -> Do:
        """Decide while no exchange is running."""
        orders = seen.orders
        if seen.over:
            return Do.END
        if orders.phase not in OPEN:
            return Do.WAIT
        if orders.timeline != seen.timeline:
            self.stale = True
            if self.finished:
                self.finished = False
                return Do.RESUME
        if seen.assigned:
            if not orders.replicas:
                # A spare worker: nothing to do until replicas are assigned to it.
                self.begun, self.stale = orders, True
                return Do.WAIT
            if self.stale or orders.work != self.begun.work or orders.peers != self.begun.peers:
                return Do.LOCATE
            self.todo = self.todo or set(self.begun.replicas)
            if seen.last_done:
                return Do.FINISH
            return Do.BEGIN if seen.rated else Do.WAIT
        if not seen.script:
            if self.finished or (seen.leaving and not self.leases.has_next):
                return Do.REST
            if not self.stale and not self.leases.has_next:
                return Do.LEASE
        if self.stale or seen.resting:
            return Do.LOCATE
        self.todo = {0}
        return Do.BEGIN

    def failed(self, error: Exception, seen: Seen, *, resend: bool = True) -> Do:
        """Decide after a failed exchange. resend: False if the orders have changed meanwhile."""
        if seen.over:
            self.stale = True
            return Do.END
        if isinstance(error, Stopped):
            self.stale = True
            return Do.WAIT if seen.assigned else Do.FINISH
        overtaken = isinstance(error, Overtaken)
        again = not seen.assigned or not self.iterating or seen.resends
        if resend and again and seen.orders.timeline == seen.timeline and not overtaken:
            return Do.RESEND
        if self.iterating:
            self.stale = True
            return Do.AGAIN
        return Do.CATCH_UP if overtaken and not seen.retained else Do.CARRY_OVER

    def advance(self, *, assigned: bool) -> None:
        self.todo = set(self.begun.replicas) if assigned else {0}
        self.leases.batch += self.leases.lease is not None


@fixed(kw_only=True)
class TrainingPosition:
    """A job's position as one worker sees it."""

    step: int
    """Steps done; in asynchronous mode, the fewest updates of any shard."""
    ahead: int = 0
    """Calls of optimizer.step() since then that the servers' state does not contain: those of an unfinished round, and
    those after the end of the job."""
    incarnation: int
    """The worker's incarnation."""
    one_step: bool
    """All servers are at the same step of the job."""

    def stamp(self) -> dict[str, int]:
        """The entry for a state dict made now."""
        return {"step": self.step, "ahead": self.ahead, "incarnation": self.incarnation}


WARN_S = 10.0
"""Seconds at one step before a warning."""
WARN_PASSES = 100
"""Passes without step() before a warning, however short they were."""
AGAIN_S = 60.0
"""Seconds between two warnings: a loop that accumulates gradients by hand does this on purpose."""


class MissingSteps:
    """A loop over steps() that never calls optimizer.step(), and so gets one step again and again.

    Used by the session's thread; the clock is an argument.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: how long other replicas may wait for a step that this worker does not make."""
        self._timeout_s = timeout_s
        self._ask_s = min(WARN_S, timeout_s / 6)
        self._told_s: float | None = None
        self.passes = 0
        """Passes begun since the last call of step()."""
        self._since_s = self._asked_s = 0.0
        self._waiting_since_s: float | None = None

    def reset(self) -> None:
        """Start over: step() was called, or the cluster changed and the loop has to find its step again."""
        self.passes = 0
        self._waiting_since_s = None

    def begin(self, step: int, now_s: float) -> bool:
        """Begin a pass. Returns whether it is time to find out who waits for the step, see waited_for()."""
        if not self.passes:
            self._since_s = self._asked_s = now_s
        self.passes += 1
        lasted_s = now_s - self._since_s
        many = self.passes > WARN_PASSES or (self.passes > 1 and lasted_s >= WARN_S)
        if many and (self._told_s is None or now_s - self._told_s >= AGAIN_S):
            self._told_s = now_s
            log.warning(
                "the loop has been at step %d for %.0f s and %d passes without calling optimizer.step(): "
                "session.steps() repeats a step until it is called. Call it in every pass",
                step,
                lasted_s,
                self.passes - 1,
            )
        if self.passes == 1 or now_s - self._asked_s < self._ask_s:
            return False
        self._asked_s = now_s
        return True

    def waited_for(self, step: int, others: Sequence[int], now_s: float) -> None:
        """others: replicas that have contributed to this step. Raises JobError if they have waited too long."""
        if not others:
            self._waiting_since_s = None
            return
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        waited_s = now_s - self._waiting_since_s
        if waited_s >= self._timeout_s:
            raise JobError(
                f"step {step}: optimizer.step() was not called in {self.passes - 1} passes of the loop, and replica "
                f"{', '.join(map(str, others))} waited {waited_s:.0f} s for it (--timeout {self._timeout_s:g}); all "
                "workers must call optimizer.step() in every step"
            )


class LoopMistakes:
    """Logs, once, mistakes of a script's own loop that it would not notice. Used by the session's thread."""

    def __init__(self) -> None:
        self._goes_on = 0
        """The job's step when this process joined, until the loop is known to have taken it into account; then 0."""
        self._refused = 0

    @property
    def lost(self) -> int:
        """Steps that the loop has taken although the job had ended: those after the first JobStopped."""
        return max(0, self._refused - 1)

    def stopped(self, link: ChiefLink, step: int) -> None:
        """Raise JobStopped: nothing but this tells the loop that its step was not made, because the job has ended.

        step: that of the parameters in the model.
        """
        link.wait(lambda o: o.stop_step > 0 or o.fenced or o.phase is Phase.ENDED, timeout_s=link.timeouts.rpc_s)
        orders = link.orders
        self._refused += 1
        # If it isn't known in time, this worker's own step is the best guess.
        step = orders.stop_step or step
        what = "this worker left the job" if orders.fenced else "the job ended"
        what += f" with exit code {orders.exit_code}" if orders.exit_code else ""
        why = f" ({orders.reason})" if orders.reason else ""
        error = JobStopped(
            f"{link.task}: {what} at step {step}{why}; optimizer.step() changed nothing. Leave the loop; "
            "--resume continues the job",
            step,
        )
        if not self.lost:
            # Python says nothing when a SystemExit ends the process.
            log.warning("%s", error)
        raise error

    def attached(self, step: int) -> None:
        self._goes_on = step

    def knows_the_step(self) -> None:
        """The loop knows the job's step: it is over steps(), has read session.step, or loaded a state of that step."""
        self._goes_on = 0

    def about_to_step(self) -> None:
        if self._goes_on:
            log.warning(
                "the job continues at step %d, but this script has neither read that (session.step, session.steps()) "
                "nor loaded an optimizer state of that step: a loop that counts from 0 repeats %d steps. Loop over "
                "session.steps(), or let the Trainer resume from its own checkpoint of step %d "
                "(resume_from_checkpoint=, ckpt_path=)",
                *(self._goes_on,) * 3,
            )
            self._goes_on = 0
