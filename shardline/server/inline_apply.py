"""Which complete buckets are counted on the loop, without the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardline.server.backend import HostedShard
from shardline.server.slots import Slot

QUICK_BYTES = 64 << 10
"""Total size of buckets that are counted on the loop: about ten microseconds of arithmetic."""


def applies_inline(shard: HostedShard, numbers: Iterable[int]) -> bool:
    """Whether to count these buckets on the loop, because handing them to the pool would take longer.

    Excludes everything that may take long: many bytes, a locked bucket, or a shard that has to wait.
    """
    nbytes = 0
    for number in numbers:
        bucket = shard.buckets[number]
        nbytes += bucket.spec.nbytes
        if nbytes > QUICK_BYTES or bucket.lock.locked():
            return False
    return shard.counts_inline


def stands_inline(shard: HostedShard, numbers: Iterable[int]) -> bool:
    """Whether to count a push without gradients of these buckets on the loop, however large they are.

    So it is where nobody else's gradient belongs to the step, and both published steps are the same: there is nothing
    to compute or to copy.
    """
    for number in numbers:
        bucket = shard.buckets[number]
        if bucket.lock.locked() or bucket.changed_step >= bucket.step:
            return False
    return shard.replicas == 1 and shard.counts_inline


def release_all(slots: Sequence[Slot]) -> None:
    for slot in slots:
        slot.release()
