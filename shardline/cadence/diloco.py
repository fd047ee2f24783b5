"""DiLoCo: many local steps, then an outer step with Nesterov momentum along the mean change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.local_training import LocalCadence
from shardline.core.spec import Argument
from shardline.errors import JobError


@dataclass(frozen=True)
class DiLoCo(LocalCadence):
    """Run the job's optimizer on each worker for `every` passes, then take an outer Nesterov step by the mean delta."""

    name: ClassVar[str] = "diloco"
    every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.outer_lr < math.inf:
            raise JobError(
                f"cadence {self.name}: outer_lr is {self.outer_lr}; give a finite number above 0, such as 0.7"
            )
        if not 0.0 <= self.outer_momentum < 1.0:
            raise JobError(
                f"cadence {self.name}: outer_momentum is {self.outer_momentum}; give a number from 0 to below 1, "
                "such as 0.9"
            )

    @property
    def outer_rule(self) -> Mapping[str, Argument]:
        """See Cadence.outer_rule. Torch's Nesterov momentum needs a momentum."""
        momentum = float(self.outer_momentum)
        return {"lr": float(self.outer_lr), "momentum": momentum, "nesterov": momentum > 0.0}
