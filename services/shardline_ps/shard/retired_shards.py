"""Reconfiguration of a ps: shards that are not kept are retired before new ones take their memory.

Anything that works on a shard keeps it alive: waiting calls, their frames, pool threads. So the old shards are first
removed from the store, waiting calls are woken, and new shards are created once nothing uses the old ones any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardline.rpc.messages.configuration import PsConfiguration
from shardline_ps.shard.shard import Shard


@dataclass(frozen=True)
class Reconfiguration:
    """A checked configuration, and what it keeps of the current one."""

    configuration: PsConfiguration
    kept: Mapping[int, Shard]
    standbys: frozenset[int]
    """Shards whose standbys are kept."""


class RetiredShards:
    """Retired shards that are still in use. Created and queried on the server's loop."""

    def __init__(self, shards: Iterable[Shard], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gone = asyncio.Event()
        self._left: list[tuple[int, weakref.ref[object]]] = []
        for shard in shards:
            # Published values and single buckets may be in use without their shard.
            for part in (shard, shard.publication, *shard.buckets):
                self._left.append((shard.number, weakref.ref(part, self._look)))

    def _look(self, ref: weakref.ref[object]) -> None:
        # Called on whichever thread used it last; if the loop is closed, nobody is waiting.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._gone.set)

    @property
    def numbers(self) -> list[int]:
        """Shards of which some part is still in use."""
        self._left = [(number, ref) for number, ref in self._left if ref() is not None]
        return sorted({number for number, _ in self._left})

    async def gone(self, timeout_s: float) -> bool:
        """Wait until none is in use; False on timeout. timeout_s: seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.numbers:
                    self._gone.clear()
                    # No wake-up is lost: a part freed after the check sets the event in a later turn of the loop.
                    await self._gone.wait()
        return not self.numbers
