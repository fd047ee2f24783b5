"""The part of a model that a worker exchanges with the servers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardline.core.plan import Plan
from shardline.waist import Want

Key = tuple[int, int]
"""(shard, bucket)."""


class Share:
    """Buckets of a plan that a worker pushes and pulls: all of them, or those of the fragments that it computes."""

    def __init__(
        self,
        plan: Plan,
        replicas: Iterable[int] = (),
        *,
        fragments: Mapping[int, Sequence[int]] | None = None,
        pulled: Iterable[int] = (),
    ) -> None:
        """replicas: the worker's. fragments: by replica, to push and pull; None = the whole model. pulled: more
        fragments to pull, that others push.
        """
        self.replicas = sorted(replicas)
        self.partial = fragments is not None
        """Only some buckets. Those of one worker's replicas may differ, so that their gradients are not added up."""
        self._fragments = {replica: frozenset(own) for replica, own in (fragments or {}).items()}
        self._all = [
            ((s, b), plan.tensors[bucket.slices[0].tensor].fragment)
            for s, shard in enumerate(plan.shards)
            for b, bucket in enumerate(shard.buckets)
        ]
        own = frozenset(pulled).union(*self._fragments.values())
        self.keys = [key for key, fragment in self._all if not self.partial or fragment in own]
        """Every bucket that is pulled, in the plan's order."""
        self.shards = sorted({shard for shard, _ in self.keys})

    def of(self, replica: int) -> list[Key]:
        """Buckets to which this replica's part of a step contributes."""
        if not self.partial:
            return self.keys
        fragments = self._fragments.get(replica, frozenset())
        return [key for key, fragment in self._all if fragment in fragments]

    def asks(self, want: Want) -> Mapping[int, Want]:
        return {shard: replace(want, buckets=self.buckets(shard)) for shard in self.shards}

    def buckets(self, shard: int) -> list[int]:
        return [bucket for s, bucket in self.keys if s == shard] if self.partial else []
