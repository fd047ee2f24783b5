"""Mistakes of a script's own loop that it would not notice."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shardline.core.orders import Phase
from shardline.errors import JobError, JobStopped
from shardline.rpc.link import ChiefLink

log = logging.getLogger("shardline.client")

WARN_S = 10.0
"""Seconds at one step before a warning."""
WARN_PASSES = 100
"""Passes without step() before a warning, however short they were."""
AGAIN_S = 60.0
"""Seconds between two warnings: a loop that accumulates gradients by hand does this on purpose."""


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
        """Warn of steps that will be done twice."""
        if self._goes_on:
            log.warning(
                "the job continues at step %d, but this script has neither read that (session.step, session.steps()) "
                "nor loaded an optimizer state of that step: a loop that counts from 0 repeats %d steps. Loop over "
                "session.steps(), or let the Trainer resume from its own checkpoint of step %d "
                "(resume_from_checkpoint=, ckpt_path=)",
                *(self._goes_on,) * 3,
            )
            self._goes_on = 0


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
