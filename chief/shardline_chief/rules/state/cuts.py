"""Which cuts can be fetched and which must be discarded: all shards hold a step, or none does (PROTOCOL 1.7). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shardline.core.status import ShardStatus


class CutLedger:
    """Cuts held by the shards, as last reported."""

    def __init__(self, num_shards: int) -> None:
        """num_shards: number of shards that are not empty."""
        self._num_shards = num_shards
        self._shards: dict[int, ShardStatus] = {}
        self._passed: dict[int, int] = {}
        """step_min of each shard in the report before the last."""
        self._closed = -1
        """Highest step dealt with: its Release drops all cuts up to it."""
        self._reopened: set[int] = set()

    def observe(self, shards: Iterable[ShardStatus]) -> None:
        for shard in shards:
            if shard.shard in self._shards:
                self._passed[shard.shard] = self._shards[shard.shard].step_min
            self._shards[shard.shard] = shard

    def complete(self) -> list[int]:
        """Steps that all shards hold completely and that are still open, ascending."""
        if len(self._shards) < self._num_shards:
            return []
        held = [{cut.step for cut in shard.cuts if cut.complete and not cut.skipped} for shard in self._shards.values()]
        return sorted(step for step in set.intersection(*held) if self._open(step)) if held else []

    def lost(self) -> list[int]:
        """Steps that some shard holds or has begun and another has skipped: they can never become complete."""
        named = {cut.step for shard in self._shards.values() for cut in shard.cuts}
        return sorted(
            step
            for step in named
            if self._open(step) and any(self._left_out(shard, step) for shard in self._shards.values())
        )

    def _left_out(self, shard: ShardStatus, step: int) -> bool:
        mine = [cut for cut in shard.cuts if cut.step == step]
        if mine:
            return any(cut.skipped for cut in mine)
        # A bucket copies itself before it passes the step. Compared with the previous report, since a report isn't made
        # at one instant: the copy may have been made after its list of cuts was read and before its step was.
        return self._passed.get(shard.shard, 0) > step

    def _open(self, step: int) -> bool:
        return step > self._closed or step in self._reopened

    def close(self, step: int) -> None:
        """Committed or discarded: ignore later reports of it and earlier ones, sent before the Release arrived."""
        self._closed = max(self._closed, step)
        self._reopened = {again for again in self._reopened if again > step}

    def reopen(self, step: int) -> None:
        self._reopened.add(step)
