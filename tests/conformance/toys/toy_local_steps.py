"""A third-party cadence in one file: plain SGD steps on a copy per replica; sends how they changed it.

Load it as a plugin and name it: `--cadence local:steps=4,lr=0.05`, with SGD at learning rate 1 on the servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shardline.cadence import CADENCES, Cadence, Held, LocalTraining, Outgoing, Rounds, Sends
from shardline.core.spec import TensorKind


class Copies(LocalTraining):
    """One copy of the parameters and buffers per replica, loaded into the model for a pass."""

    def __init__(self, held: Held, lr: float) -> None:
        self._held = held
        self._lr = lr
        self._kinds = {spec.name: spec.kind for spec in held.specs}
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        self._samples: dict[int, int] = {}

    def began(self, step: int) -> None:
        self._copies.clear()
        self._samples.clear()
        # Between two steps the model shows the servers' values.
        self._lend(self._held.pulled)

    def _lend(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name in self._kinds:
                self._held.model[name].copy_(values[name])

    def enter(self, replica: int, tick: int) -> None:
        self._lend(self._copies.get(replica, self._held.pulled))

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        with torch.no_grad():
            for name, gradient in outgoing.values.items():
                self._held.model[name].sub_(gradient, alpha=self._lr)
        now = {name: self._held.model[name].detach().clone() for name in self._kinds}
        self._copies[replica] = now
        self._samples[replica] = self._samples.get(replica, 0) + outgoing.samples
        trained = [name for name, kind in self._kinds.items() if kind is TensorKind.PARAM]
        deltas = {name: self._held.pulled[name].detach() - now[name] for name in trained}
        buffers = {name: now[name] for name, kind in self._kinds.items() if kind is TensorKind.BUFFER}
        return replace(
            outgoing, values=deltas, buffers=buffers if replica == 0 else {}, samples=self._samples[replica], keep=True
        )


@CADENCES.add
@dataclass(frozen=True)
class Local(Cadence):
    """Train with SGD for some steps, then send old parameters minus new ones."""

    name: ClassVar[str] = "local"
    sends: ClassVar[Sends] = Sends.DELTAS
    steps: int = 2
    lr: float = 0.05

    @property
    def rounds(self) -> Rounds:
        return Rounds(ticks=self.steps)

    def local(self, held: Held) -> LocalTraining:
        return Copies(held, self.lr)
