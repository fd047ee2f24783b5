"""The smallest number of steps between checkpoints at which writing them keeps up with training. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.04
"""Share of a link's rate that fetching cuts may take in the long run."""


class StepClock:
    """Mean duration of a step since the first one observed."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def observe(self, step: int, now_s: float) -> None:
        """Note the job's current step; a rollback restarts the measurement."""
        if self._last is not None and step < self._last[0]:
            self._first = None
        if self._last is None or step != self._last[0]:
            self._last = (step, now_s)
        if self._first is None and step > 0:
            self._first = self._last

    @property
    def seconds(self) -> float:
        """Mean seconds per step; 0 until two different steps have been observed."""
        if self._first is None or self._last is None or self._last[0] == self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The smallest checkpoint interval, in steps, with which writing keeps up."""

    steps: int
    sentence: str
    too_small: bool
    """Whether checkpoint_every is below `steps`."""


def least_interval(
    nbytes: int, least_s: float, link_rate: float, step_s: float, every: int, *, share: float = SHARE
) -> Interval:
    """The smallest interval for checkpoints of nbytes bytes that take least_s seconds, at step_s seconds per step.

    link_rate: bytes per second, 0 if no link is throttled. every: the job's checkpoint_every, in steps.
    """
    steps = max(1, math.ceil(least_s / step_s))
    of_link = f" at {share * 100:g} % of the link's {link_rate / 1e6:.0f} MB/s" if link_rate else ""
    sentence = (
        f"a checkpoint of {nbytes / 1e6:.1f} MB takes {_seconds(least_s)}{of_link}, and a step {_seconds(step_s)}: "
        f"with an interval below {steps} steps checkpoints can't keep up"
    )
    if every < steps:
        sentence += f", so with checkpoint_every={every} some are skipped"
    return Interval(steps=steps, sentence=sentence, too_small=every < steps)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
