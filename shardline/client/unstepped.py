"""Detects a loop over steps() that never calls optimizer.step() and so gets the same step again and again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shardline.client.exchange.outcomes import Interrupted, Restart
from shardline.client.step.trainer import Trainer
from shardline.errors import JobError, UnreachableError

log = logging.getLogger("shardline.client")

WARN_S = 10.0
"""Seconds at one step before a warning."""
WARN_PASSES = 100
"""Passes without step() before a warning, however short they were."""
AGAIN_S = 60.0
"""Seconds between two warnings: a loop that accumulates gradients by hand does this on purpose."""


class Unstepped:
    """Counts passes of the loop's body at one step. Used by the session's thread; the clock is an argument."""

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


def waiting_replicas(trainer: Trainer, owned: Sequence[int]) -> list[int]:
    """Replicas of other workers that every shard has counted in the open step; none if a server can't answer now.

    No exchange may be running.
    """
    if not trainer.methods.mode.assigns_replicas:
        return []
    others = [replica for replica in range(trainer.job.replicas) if replica not in owned]
    try:
        standings = trainer.standings(others).values() if others else ()
    except (Restart, Interrupted, UnreachableError) as error:
        log.debug("step %d: asking which replicas are waiting: %s", trainer.step, error)
        return []
    return [replica for replica in others if all(found.replicas[replica] > trainer.step for found in standings)]
