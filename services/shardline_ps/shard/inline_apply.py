"""Which whole buckets are counted where they come in, without the pool."""

from __future__ import annotations

from collections.abc import Sequence

from shardline_ps.memory.slots import Slot
from shardline_ps.shard.shard import Shard

QUICK_BYTES = 64 << 10
"""Of buckets that are counted on the loop: some ten microseconds of arithmetic."""


def is_quick(shard: Shard, slots: Sequence[Slot]) -> bool:
    """Whether to count these buckets on the loop: handing them to the pool and back would take longer.

    Nothing that may take long: neither many bytes nor a bucket in use, another device, a vote or a standby.
    """
    return (
        sum(slot.spec.nbytes for slot in slots) <= QUICK_BYTES
        and shard.settings.device.type == "cpu"
        and not shard.consistency.waits_for_verdict
        and shard.log is None
        and not any(shard.buckets[slot.number].lock.locked() for slot in slots)
    )


def release_all(slots: Sequence[Slot]) -> None:
    """Give back the room of these."""
    for slot in slots:
        slot.release()
