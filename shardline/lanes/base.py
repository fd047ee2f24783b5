"""The lane seam: how the bytes of pushes and pulls travel between one task and one shard.

A lane changes no state: only the shard's ack says what became of a push.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.waist import Memory, Sender, ShardService


class LaneUnavailable(Exception):
    """The two tasks can't use this lane; the message says why. Another lane takes its place."""


class SharedMemory(Protocol):
    """Segments mapped by both a task and a shard."""

    @property
    def is_read(self) -> bool:
        """Whether the shard may still read pushed bytes, since no pull has shown a later step yet."""

    def slot(self, offset: int, nbytes: int) -> memoryview:
        """Writable part of the segment from which the shard reads gradients."""

    def area(self, number: int) -> memoryview:
        """The shard's publications of even (0) or odd (1) steps; what is written there stays in this process."""


class Lane(ShardService, Protocol):
    """One task's connection to one shard; makes one call, no retry. Any thread may call cancel()."""

    @property
    def name(self) -> str:
        """Name of the lane, or of the one in use."""

    def state(
        self, sender: Sender, step: int, buckets: Sequence[int], *, timeout_s: float
    ) -> Sequence[BucketImage] | None:
        """Parameters and optimizer state of some buckets at a step, where workers run the optimizer.

        buckets: empty = all of parameters. None if the shard does not have that state.

        One call, no retry. Raises UnreachableError, ProtocolError; NotAdmittedError if it accepts nothing from here.
        """

    def bring_state(self, sender: Sender, images: Sequence[BucketImage], *, timeout_s: float) -> Outcome:
        """Bring the shard such a state for a cut; one call, no retry. Raises UnreachableError, ProtocolError."""

    def cancel(self) -> None:
        """Make a running exchange raise UnreachableError early."""

    def close(self) -> None:
        """Free the connection."""

    # For lanes that share memory with the shard

    @property
    def by_reference(self) -> bool:
        """Whether payloads are in memory that both sides map, so that no bytes are sent."""
        return False

    @property
    def published(self) -> SharedMemory | None:
        """Memory in which this side reads the shard's parameters in place; None if there is none (yet)."""
        return None

    def allocate(self, bucket: int, nbytes: int) -> Memory | None:
        """Memory that the shard reads: a gradient computed there needs no copy. None if there is currently none."""
        return None
