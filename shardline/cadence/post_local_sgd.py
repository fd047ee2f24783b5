"""Post-local SGD: every step is exchanged until the training has settled, then the replicas train locally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.base import Rounds
from shardline.cadence.local_training import LocalCadence
from shardline.errors import JobError


@dataclass(frozen=True)
class PostLocalSGD(LocalCadence):
    """Average the replicas' parameters after every pass, and from step `start` on only after `every` passes."""

    name: ClassVar[str] = "post-local-sgd"
    start: int = 100
    every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start < 0:
            raise JobError(f"cadence post-local-sgd: start is {self.start}; give a step, at least 0")

    @property
    def rounds(self) -> Rounds:
        return Rounds(ticks=self.every, start=self.start, together=self.start > 0 and self.every > 1)
