"""Local SGD: after a few local steps, the replicas' parameters are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.local_training import LocalCadence


@dataclass(frozen=True)
class LocalSGD(LocalCadence):
    """Run the job's optimizer on each worker for `every` passes, then average the replicas' parameters."""

    name: ClassVar[str] = "local-sgd"
    every: int = 8
