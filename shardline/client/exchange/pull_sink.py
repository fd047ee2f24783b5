"""What an exchange has to know of the memory that pulled buckets go to."""

from __future__ import annotations

from typing import Protocol

from shardline.core.exchange import Sink


class PullSink(Sink, Protocol):
    """One shard's pulls, one after the other."""

    num_buckets: int
    shard_bytes: int
    """Of all buckets, before encoding."""
    arrived: set[int]
    """Buckets of the running pull that are whole."""
    raw_bytes: int
    """Pulled so far, before encoding and encoded."""
    wire_bytes: int
    first_s: float
    """When the running pull's first bucket began to come, by the monotonic clock; 0 = none has."""

    def begin(self) -> None:
        """A new pull begins."""
        ...
