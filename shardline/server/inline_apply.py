"""Which whole buckets are counted where they come in, without the pool."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.server.backend import HostedShard
from shardline.server.slots import Slot

QUICK_BYTES = 64 << 10
"""Of buckets that are counted on the loop: some ten microseconds of arithmetic."""


def applies_inline(shard: HostedShard, slots: Sequence[Slot]) -> bool:
    """Whether to count these buckets on the loop: handing them to the pool and back would take longer.

    Nothing that may take long: neither many bytes nor a bucket in use, nor what the shard has to wait for.
    """
    return (
        sum(slot.spec.nbytes for slot in slots) <= QUICK_BYTES
        and shard.counts_inline
        and not any(shard.buckets[slot.number].lock.locked() for slot in slots)
    )


def release_all(slots: Sequence[Slot]) -> None:
    """Give back the room of these."""
    for slot in slots:
        slot.release()
