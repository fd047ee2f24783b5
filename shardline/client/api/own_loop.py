"""Mistakes that the user's own training loop (such as a Trainer's) would not notice; each is logged once."""

from __future__ import annotations

import logging

from shardline.client.api.step_finder import StepFinder
from shardline.core.orders import Phase
from shardline.errors import JobStopped

log = logging.getLogger("shardline.client")


class OwnLoop:
    """Watches the steps of a script. Used by the session's thread."""

    def __init__(self) -> None:
        self._goes_on = 0
        """The job's step when this process joined, until the loop is known to have taken it into account; then 0."""
        self._refused = 0

    @property
    def lost(self) -> int:
        """Steps that the loop has taken although the job had ended: those after the first JobStopped."""
        return max(0, self._refused - 1)

    def check_goes_on(self, finder: StepFinder, step: int) -> None:
        """Raise JobStopped after a step that was not made because the job has ended, if nothing else tells the loop.

        step: that of the parameters in the model.
        """
        if finder.iterating or not finder.stale:
            return
        link = finder.link
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
        """Record the job's step."""
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
