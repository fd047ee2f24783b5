"""Which bucket leaves next: first what the next forward pass needs first, one credit window at a time. Pure.

Gradients become ready from the last layer to the first, but the next forward pass needs the first layer first. Cutting
tensors into slices and limiting the bytes in flight let an urgent bucket overtake waiting ones. P3: Jayarajan et al.,
"Priority-based Parameter Propagation for Distributed DNN Training", 2019; credit: Peng et al., "A Generic Communication
Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), 2019.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from shardline.core.plan import Plan, ShardSpec

CREDIT_FLOOR_BYTES = 4 << 20
"""Smaller windows cost more in messages than they gain by better order."""


def bucket_ranks(plan: Plan, uses: Sequence[int]) -> list[list[int]]:
    """Rank of each bucket by shard, 0 = most urgent; ranks are unique within a plan.

    uses: tensor numbers in the order of their first use in a forward pass. Buckets of tensors that were not seen come
    last; ties (slices of one tensor) keep the plan's order.
    """
    place = {tensor: position for position, tensor in reversed(list(enumerate(uses)))}
    unseen = len(uses)
    keys = sorted(
        (min((place.get(piece.tensor, unseen) for piece in bucket.slices), default=unseen), b, s)
        for s, shard in enumerate(plan.shards)
        for b, bucket in enumerate(shard.buckets)
    )
    ranks = [[0] * len(shard.buckets) for shard in plan.shards]
    for rank, (_, b, s) in enumerate(keys):
        ranks[s][b] = rank
    return ranks


def pull_order(ranks: Sequence[int], *, at_once: bool, sent: Sequence[int] = ()) -> list[int]:
    """A shard's buckets in the order in which to request them; it answers in that order.

    at_once: the shard applies a whole step at once, so the buckets that the next forward pass needs first come first.
    Otherwise it applies bucket by bucket and can first answer what is pushed first. sent: the order of sending in the
    previous step; () = unknown, then last layers first, as in a backward pass.
    """
    by_rank = sorted(range(len(ranks)), key=ranks.__getitem__)
    if at_once:
        return by_rank
    known = set(sent)
    return [*sent, *(bucket for bucket in reversed(by_rank) if bucket not in known)]


def default_credit(shard: ShardSpec) -> int:
    """Bytes that may be in flight to a shard: two of its largest buckets, one being sent and one behind it."""
    return max(CREDIT_FLOOR_BYTES, 2 * max((bucket.nbytes for bucket in shard.buckets), default=0))


class SendQueue:
    """The ready buckets of one push, most urgent first. Guarded by its owner's lock.

    ranks, sizes (bytes): by bucket. take() returns at most credit_bytes, but at least one bucket; the lane calls it
    again when those are on the wire, which returns their credit. Every added bucket is sent: nothing is added after the
    backward pass, so urgent buckets can't hold back the rest forever.
    """

    def __init__(self, ranks: Sequence[int], sizes: Sequence[int], credit_bytes: int) -> None:
        self._ranks = ranks
        self._sizes = sizes
        self._credit_bytes = credit_bytes
        self._ready: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, bucket: int) -> None:
        heapq.heappush(self._ready, (self._ranks[bucket], bucket))

    def take(self) -> list[int]:
        """The next buckets to send, in order; [] if none is ready."""
        taken: list[int] = []
        left = self._credit_bytes
        while self._ready and (not taken or self._sizes[self._ready[0][1]] <= left):
            _, bucket = heapq.heappop(self._ready)
            left -= self._sizes[bucket]
            taken.append(bucket)
        return taken
