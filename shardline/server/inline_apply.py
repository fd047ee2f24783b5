"""Which complete buckets are counted on the loop, without the pool."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.server.backend import HostedShard
from shardline.server.slots import Slot

QUICK_BYTES = 64 << 10
"""Total size of buckets that are counted on the loop: about ten microseconds of arithmetic."""


def applies_inline(shard: HostedShard, slots: Sequence[Slot]) -> bool:
    """Whether to count these buckets on the loop, because handing them to the pool would take longer.

    Excludes everything that may take long: many bytes, a locked bucket, or a shard that has to wait.
    """
    return (
        sum(slot.spec.nbytes for slot in slots) <= QUICK_BYTES
        and shard.counts_inline
        and not any(shard.buckets[slot.number].lock.locked() for slot in slots)
    )


def release_all(slots: Sequence[Slot]) -> None:
    """Release these slots."""
    for slot in slots:
        slot.release()
