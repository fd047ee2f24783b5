"""The lane seam: how the bytes of pushes and pulls between one task and one shard travel.

A lane changes no state: what became of a push is only what the shard's ack says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardline.core.exchange import Contribution, Exchanged, Sender, Sink, Standing, Want


class LaneUnavailable(Exception):
    """The pair of tasks can't use this lane; the sentence says why. Another lane takes its place."""


class SharedMemory(Protocol):
    """Segments that a task and a shard both map."""

    @property
    def is_read(self) -> bool:
        """Whether the shard may still read what was pushed, since no pull has shown a later step of it."""
        ...

    def slot(self, offset: int, nbytes: int) -> memoryview:
        """A place of the segment from which the shard reads gradients, writable."""
        ...

    def area(self, number: int) -> memoryview:
        """What the shard publishes at even (0) or odd (1) steps, read-only."""
        ...


class Lane(Protocol):
    """One task's way to one shard. Used by one thread at a time; cancel() may come from any."""

    @property
    def name(self) -> str:
        """Name of the lane, or of the one in use."""
        ...

    def exchange(
        self, sender: Sender, contributions: Sequence[Contribution], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        """Push contributions and pull in one call.

        Raises UnreachableError on a broken or late call, ProtocolError if the shard refuses it as malformed.
        """
        ...

    def progress(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        """What the shard has counted of some replicas; asked once. Raises UnreachableError."""
        ...

    def cancel(self) -> None:
        """End a running exchange early; it raises UnreachableError."""
        ...

    def close(self) -> None:
        """Free the connection."""
        ...

    # What lanes have that share memory with the shard

    @property
    def by_reference(self) -> bool:
        """Whether payloads lie in memory that both sides map, so that none of their bytes is on a wire."""
        return False

    @property
    def published(self) -> SharedMemory | None:
        """Memory in which this side reads the shard's parameters where they lie; None if there is none (yet)."""
        return None

    def allocate(self, bucket: int, nbytes: int) -> memoryview | None:
        """Memory that the shard reads: a gradient computed there needs no copy. None if there is none now."""
        return None
