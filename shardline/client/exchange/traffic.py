"""Bytes between one worker and its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardline.client.exchange.live import LivePayloads, ReadyPayloads
from shardline.client.exchange.pull_sink import PullSink
from shardline.core.exchange import Contribution


class PushTraffic:
    """Counts pushed bytes; the sinks count pulled ones."""

    def __init__(self, sinks: Mapping[int, PullSink]) -> None:
        self._sinks = sinks
        self._pushed = {shard: [0, 0] for shard in sinks}
        self._taken: dict[int, tuple[int, int, int, int]] = {}

    def pushed(self, shard: int, pushes: Iterable[Contribution], *, on_wire: bool) -> None:
        """Count acknowledged pushes. A retry's bytes count once; bytes in shared memory are not wire bytes."""
        for push in pushes:
            if isinstance(push.payloads, (LivePayloads, ReadyPayloads)):
                self._pushed[shard][0] += push.payloads.raw_bytes
                self._pushed[shard][1] += push.payloads.wire_bytes if on_wire else 0

    @property
    def total(self) -> tuple[int, int, int, int]:
        """Bytes so far: pushed raw, pushed wire, pulled raw, pulled wire."""
        return (
            sum(raw for raw, _ in self._pushed.values()),
            sum(wire for _, wire in self._pushed.values()),
            sum(sink.raw_bytes for sink in self._sinks.values()),
            sum(sink.wire_bytes for sink in self._sinks.values()),
        )

    def take(self, shard: int) -> list[tuple[str, int, int]]:
        """("push" or "pull", raw, wire) bytes with one shard since the last call."""
        pushed, sink = self._pushed[shard], self._sinks[shard]
        now = (pushed[0], pushed[1], sink.raw_bytes, sink.wire_bytes)
        before = self._taken.get(shard, (0, 0, 0, 0))
        self._taken[shard] = now
        push_raw, push_wire, pull_raw, pull_wire = (a - b for a, b in zip(now, before, strict=True))
        return [("push", push_raw, push_wire), ("pull", pull_raw, pull_wire)]
