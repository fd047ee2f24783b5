"""The part of a model that a worker exchanges with the servers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardline.core.exchange import Want
from shardline.core.plan import Plan

Key = tuple[int, int]
"""(shard, bucket)."""


class Share:
    """Buckets of a plan that a worker pushes and pulls: all of them, or in a pipeline those of its units."""

    def __init__(
        self, plan: Plan, replicas: Iterable[int] = (), *, stages: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """replicas: the worker's. stages: by replica; None = the whole model."""
        self.replicas = sorted(replicas)
        self.partial = stages is not None
        """Only some buckets. Those of one worker's replicas may differ, so that their gradients are not added up."""
        self._stages = {replica: frozenset(own) for replica, own in (stages or {}).items()}
        self._all = [
            ((s, b), plan.tensors[bucket.slices[0].tensor].fragment)
            for s, shard in enumerate(plan.shards)
            for b, bucket in enumerate(shard.buckets)
        ]
        own = frozenset[int]().union(*self._stages.values())
        self.keys = [key for key, stage in self._all if not self.partial or stage in own]
        """Every bucket that is pulled, in the plan's order."""
        self._shards = sorted({shard for shard, _ in self.keys})

    def of(self, replica: int) -> list[Key]:
        """Buckets to which this replica's part of a step contributes."""
        if not self.partial:
            return self.keys
        stages = self._stages.get(replica, frozenset())
        return [key for key, stage in self._all if stage in stages]

    def asks(self, want: Want) -> Mapping[int, Want]:
        """A pull of these buckets, by shard."""
        return {shard: replace(want, buckets=self.buckets(shard)) for shard in self._shards}

    def buckets(self, shard: int) -> list[int]:
        """What to ask a shard for; [] = everything."""
        return [bucket for s, bucket in self.keys if s == shard] if self.partial else []

    @property
    def shards(self) -> list[int]:
        """Shards that have some of it, ascending."""
        return self._shards
