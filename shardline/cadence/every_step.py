"""Every step: each backward pass is sent, and the next one uses the servers' new parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.base import Cadence, Held, LocalTraining, Sends


@dataclass(frozen=True)
class EveryStep(Cadence):
    """Push the gradient of each step, and continue with the parameters pulled after it."""

    name: ClassVar[str] = "every-step"
    sends: ClassVar[Sends] = Sends.GRADIENTS

    def local(self, held: Held) -> LocalTraining:
        return LocalTraining()
