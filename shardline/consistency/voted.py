"""Voted synchronous steps: a complete step waits until the lead has decided on it for all shards. PROTOCOL 1.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import Clock, Consistency


@dataclass(frozen=True)
class Voted(Consistency):
    """Every step is one update from all replicas, scaled or skipped by one decision over all shards."""

    name: ClassVar[str] = "voted"
    clock: ClassVar[Clock] = Clock.STEP
    keeps_previous: ClassVar[bool] = True
    sums_in_tree: ClassVar[bool] = True
    waits_for_verdict: ClassVar[bool] = True
    pulls_by_step: ClassVar[bool] = True
    publishes_after_standby: ClassVar[bool] = True
    consistent_cuts: ClassVar[bool] = True
    bit_exact: ClassVar[bool] = True
