"""One builder for each value that many tests need; a test names only what matters to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardline.core.plan import Plan, make_plan
from shardline.core.spec import DTYPES, ConsistencySpec, JobSpec, RuleSpec, ScheduleSpec, TensorSpec
from shardline.storage.shard import Observers
from shardline.update import rule
from shardline_ps.shard.shard import Shard, ShardSettings

SGD = rule("SGD", ({"lr": 1.0},))


def make_job_spec(**changes: Any) -> JobSpec:
    """A job with one small matrix and ten steps."""
    fields: dict[str, Any] = {
        "name": "job",
        "tensors": (TensorSpec(name="weight", shape=(3, 2), dtype="float32"),),
        "rule": RuleSpec(name="SGD", groups=({"lr": 0.1},)),
        "steps": 10,
    }
    return JobSpec(**{**fields, **changes})


def make_settings(tensors: Sequence[TensorSpec] | Plan, **changes: Any) -> ShardSettings:
    """Settings of a synchronous shard with one replica; tensors instead of a plan are those of its only shard."""
    fields: dict[str, Any] = {
        "plan": tensors if isinstance(tensors, Plan) else make_plan(tensors, 1),
        "rule": SGD,
        "schedule": ScheduleSpec(),
        "consistency": ConsistencySpec(),
        "replicas": 1,
        "cut_every": 0,
    }
    return ShardSettings(**{**fields, **changes})


def make_shard(
    tensors: Sequence[TensorSpec] | Plan, *, value: float = 0.0, observers: Observers | None = None, **changes: Any
) -> Shard:
    """A shard whose elements all start at `value`."""
    shard = Shard(0, make_settings(tensors, **changes), observers=observers)
    for bucket in shard.buckets:
        shard.initialize(bucket.number, torch.full((bucket.spec.elements,), value, dtype=DTYPES[bucket.spec.dtype]))
    return shard


def roll_back(shard: Shard) -> None:
    """Restore a shard to the values it holds: what its open steps have gathered is dropped."""
    shard.restore([bucket.image() for bucket in shard.buckets])
