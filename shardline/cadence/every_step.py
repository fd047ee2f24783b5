"""Every step: each backward pass is sent, and the next one uses the servers' new parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.base import Cadence, Held, LocalTraining, Outgoing, Sends


class SendEverything(LocalTraining):
    """No state and no changes: the model contains the pulled values, and its gradients are sent."""

    def began(self, step: int) -> None: ...

    def enter(self, replica: int, tick: int) -> None: ...

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        return outgoing


@dataclass(frozen=True)
class EveryStep(Cadence):
    """Push the gradient of each step, and continue with the parameters pulled after it."""

    name: ClassVar[str] = "every-step"
    sends: ClassVar[Sends] = Sends.GRADIENTS

    def local(self, held: Held) -> LocalTraining:
        return SendEverything()
