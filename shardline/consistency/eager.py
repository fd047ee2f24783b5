"""Eager synchronous steps: a bucket applies a step as soon as every replica's contribution is there. PROTOCOL 1.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import Clock, Consistency
from shardline.consistency.voted import Voted
from shardline.core.spec import ConsistencySpec


@dataclass(frozen=True)
class Eager(Consistency):
    """Every step is one update from all replicas."""

    name: ClassVar[str] = "sync"
    clock: ClassVar[Clock] = Clock.STEP
    keeps_previous: ClassVar[bool] = True
    sums_in_tree: ClassVar[bool] = True
    pulls_by_step: ClassVar[bool] = True
    publishes_after_standby: ClassVar[bool] = True
    consistent_cuts: ClassVar[bool] = True
    bit_exact: ClassVar[bool] = True

    def under(self, spec: ConsistencySpec) -> Consistency:
        """Clipping by the global norm and skipping a step need one decision over all shards."""
        return Voted() if spec.clip_norm > 0.0 or spec.nan_policy == "skip" else self
