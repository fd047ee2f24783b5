"""The lane seam: how the bytes of pushes and pulls between one task and one shard travel.

A lane changes no state: what became of a push is only what the shard's ack says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardline.core.exchange import Contribution, Exchanged, Sender, Sink, Standing, Want


class LaneUnavailable(Exception):
    """The pair of tasks can't use this lane; the sentence says why. Another lane takes its place."""


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

        Raises UnreachableError on a broken or late call, ProtocolError where the shard refuses it as malformed.
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
