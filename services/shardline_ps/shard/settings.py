"""The settings of a shard."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardline.codecs.coding import Coding
from shardline.core.choices import Choices
from shardline.core.plan import Plan
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings that Configure gives to every shard."""

    plan: Plan
    rule: RuleSpec
    schedule: ScheduleSpec
    consistency: ConsistencySpec
    replicas: int
    """Number of replicas whose contributions make one update."""
    cut_every: int
    replayed: Choices = field(default_factory=Choices)
    """Choices of another run, which the lead repeats."""
    coding: Coding | None = None
    """Of gradients; None = not encoded."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
