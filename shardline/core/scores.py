"""Scores that a job's learning rate follows (ReduceLROnPlateau): which count, and from which step on. Pure.

The score of step C, a multiple of checkpoint_every, changes the learning rate from step C + checkpoint_every on. The
evaluator has that long while training goes on, and a worker that gets there earlier waits. So the rate of a step
depends on no clock, and every worker finds the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

Scores = Sequence[tuple[int, float | None]]
"""(step, score) by rising steps; None if a step was not scored."""

MOST = 4096
"""Scores that a job can follow: orders have all of them."""


def counts(step: int, every: int) -> bool:
    """Return whether the score of this step is followed. every: the job's checkpoint_every."""
    return step > 0 and step % every == 0


def awaited(step: int, every: int) -> int:
    """The newest step whose score this one's learning rate needs; 0 if it needs none."""
    return max(0, (step // every - 1) * every)


def known(scores: Scores, step: int, every: int) -> bool:
    """Return whether this step's learning rate is known. One that a later score has overtaken does not come."""
    needed = awaited(step, every)
    return not needed or (bool(scores) and scores[-1][0] >= needed)


def followed(scores: Scores, step: int, every: int) -> list[float]:
    """The scores that this step's learning rate follows, in order."""
    return [value for at, value in scores if at <= awaited(step, every) and value is not None]
