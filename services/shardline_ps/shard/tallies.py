"""What a shard is made from, and what it keeps count of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardline.core.outcome import Outcome
from shardline.core.plan import Plan
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec


@dataclass
class PushRecord:
    """Asynchronous mode: what one incarnation of a worker has applied."""

    incarnation: int
    last_seq: int = 0
    outcome: Outcome = Outcome.APPLIED
    staleness: int = 0


@dataclass
class Tally:
    """Counts for status and metrics. Guarded by the shard's lock."""

    pushes: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    skipped_steps: int = 0
    duplicate_mismatches: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """What Configure says of every shard."""

    plan: Plan
    rule: RuleSpec
    schedule: ScheduleSpec
    consistency: ConsistencySpec
    replicas: int
    cut_every: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
