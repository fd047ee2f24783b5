"""A ps that is configured anew: the shards that it does not keep are let go of before new ones take their memory.

Whoever works on a shard holds it: calls that wait, their frames, threads of the pool. So the old ones are taken out of
the store first, those who wait are woken, and the new ones are made when nobody uses the old ones any more.
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
    """A configuration that was checked, and what of the one in force goes on."""

    configuration: PsConfiguration
    kept: Mapping[int, Shard]
    standbys: frozenset[int]
    """Shards whose standbys stay."""


class RetiredShards:
    """Shards that were let go of, as long as somebody uses them. Made and asked on the server's loop."""

    def __init__(self, shards: Iterable[Shard], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gone = asyncio.Event()
        self._left: list[tuple[int, weakref.ref[object]]] = []
        for shard in shards:
            # Published values and single buckets are also used without their shard.
            for part in (shard, shard.publication, *shard.buckets):
                self._left.append((shard.number, weakref.ref(part, self._look)))

    def _look(self, ref: weakref.ref[object]) -> None:
        # From whichever thread was the last to use it; a loop that is closed has nobody who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._gone.set)

    @property
    def numbers(self) -> list[int]:
        """Shards of which something is still used."""
        self._left = [(number, ref) for number, ref in self._left if ref() is not None]
        return sorted({number for number, _ in self._left})

    async def gone(self, timeout_s: float) -> bool:
        """Wait until nobody uses them; False where somebody still does after that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.numbers:
                    self._gone.clear()
                    # Never lost: whoever ends after that look sets the event in a later turn of the loop.
                    await self._gone.wait()
        return not self.numbers
