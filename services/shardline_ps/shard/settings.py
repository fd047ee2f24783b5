"""What a shard is made from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardline.core.plan import Plan
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What Configure says of every shard."""

    plan: Plan
    rule: RuleSpec
    schedule: ScheduleSpec
    consistency: ConsistencySpec
    replicas: int
    """That make one update."""
    cut_every: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
