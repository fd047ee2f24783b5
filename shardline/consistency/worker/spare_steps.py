"""Synchronous steps with spares: every replica contributes by itself, and any of them may be dropped. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardline.consistency.worker.shared_steps import SharedSteps
from shardline.core.reduce import Block


class SpareContributions(SharedSteps):
    """Replicas are not summed before they are sent, since the lead chooses among them."""

    def brings_buffers(self, replica: int) -> bool:
        """See WorkerHalf.brings_buffers: the lowest replica of the choice brings them, whichever that will be."""
        return True

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return [Block(replica, 1) for replica in sorted(owned)]
