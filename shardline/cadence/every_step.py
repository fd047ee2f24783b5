"""Every step: each backward pass is sent, and the next one computes with what the servers made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.base import Cadence, Held, LocalTraining, Outgoing


class SendEverything(LocalTraining):
    """Keeps nothing, changes nothing: the model holds what was pulled, and what it computes is sent."""

    def began(self, step: int) -> None:
        """See LocalTraining.began."""

    def enter(self, replica: int, tick: int) -> None:
        """See LocalTraining.enter."""

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """See LocalTraining.take."""
        return outgoing


@dataclass(frozen=True)
class EveryStep(Cadence):
    """Send each step's gradient, and train on with the parameters that come back."""

    name: ClassVar[str] = "every-step"

    @property
    def streams(self) -> bool:
        """See Cadence.streams."""
        return True

    def local(self, held: Held) -> LocalTraining:
        """See Cadence.local."""
        return SendEverything()
