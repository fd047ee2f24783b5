"""A third-party cadence in one file: sends the mean of the gradients of several passes.

Load it as a plugin and name it: `--cadence every:steps=2`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shardline.cadence import CADENCES, Cadence, Held, LocalTraining, Outgoing, Rounds
from shardline.errors import JobError


class Sums(LocalTraining):
    """The sum of each replica's gradients since the step began."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._sums: dict[int, dict[str, torch.Tensor]] = {}
        self._samples: dict[int, int] = {}

    def began(self, step: int) -> None:
        self._sums.clear()
        self._samples.clear()

    def enter(self, replica: int, tick: int) -> None:
        pass

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        sums = self._sums.setdefault(replica, {})
        for name, gradient in outgoing.values.items():
            sums[name] = sums[name] + gradient if name in sums else gradient.detach().clone()
        self._samples[replica] = self._samples.get(replica, 0) + outgoing.samples
        means = {name: total / self._steps for name, total in sums.items()}
        return replace(outgoing, values=means, samples=self._samples[replica], keep=True)


@CADENCES.add
@dataclass(frozen=True)
class Every(Cadence):
    """Send the mean gradient of several passes."""

    name: ClassVar[str] = "every"
    steps: int = 2

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise JobError(f"cadence every: steps is {self.steps}; give a whole number of at least 1")

    @property
    def rounds(self) -> Rounds:
        return Rounds(ticks=self.steps)

    def local(self, held: Held) -> LocalTraining:
        return Sums(self.steps)
