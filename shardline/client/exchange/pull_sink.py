"""Interface of the memory that pulled buckets go to."""

from __future__ import annotations

from typing import Protocol

from shardline.waist import Sink


class PullSink(Sink, Protocol):
    """One shard's pulls, one after another."""

    num_buckets: int
    shard_bytes: int
    """Bytes of all buckets before encoding."""
    arrived: set[int]
    """Complete buckets of the running pull."""
    raw_bytes: int
    """Bytes pulled so far, before encoding; wire_bytes: encoded."""
    wire_bytes: int
    first_s: float
    """When the running pull's first bucket began to arrive, by the monotonic clock; 0 = none has."""

    def begin(self) -> None: ...
