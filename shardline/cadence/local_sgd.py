"""Local SGD: after a few local steps, the replicas' parameters are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.local_training import LocalCadence
from shardline.core.spec import Argument


@dataclass(frozen=True)
class LocalSGD(LocalCadence):
    """Run the job's optimizer on each worker for `every` passes, then average the replicas' parameters."""

    name: ClassVar[str] = "local-sgd"
    every: int = 8

    @property
    def outer_rule(self) -> Mapping[str, Argument]:
        """See Cadence.outer_rule: with the rate 1 the mean delta leads to the mean of the replicas."""
        return {"lr": 1.0}
