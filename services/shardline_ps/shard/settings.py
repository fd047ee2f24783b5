from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardline import consistency
from shardline.codecs.coding import Coding
from shardline.core.choices import Choices
from shardline.core.plan import Plan
from shardline.core.settings import WORKER
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec
from shardline.rpc.messages.configuration import PsConfiguration


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
    aggregates: bool = False
    """Workers run the optimizer: the shard publishes mean gradients."""
    replayed: Choices = field(default_factory=Choices)
    """Choices of another run, which the lead repeats."""
    coding: Coding | None = None
    """Of gradients; None = not encoded."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, configuration: PsConfiguration, device: torch.device) -> ShardSettings:
        """The settings that a configuration gives to shards on this device."""
        return cls(
            plan=configuration.plan,
            rule=configuration.rule,
            schedule=configuration.schedule,
            consistency=configuration.consistency,
            replicas=consistency.of(configuration.consistency).contributors(configuration.replicas),
            cut_every=configuration.cut_every,
            aggregates=configuration.apply == WORKER,
            replayed=configuration.replayed,
            coding=configuration.coding.push,
            device=device,
        )
