"""Pushes of one step keep pace, so that their buckets close one after another.

A bucket closes when every replica is counted in it, so what others are far from is of no use yet. TCP shares a link
unevenly: without a rule one worker has sent everything when another is in the middle, and until then hardly anything
can be pulled. So a push that is ahead is not received from: its socket fills, its worker stops sending, and the link is
left to those behind.

A push that is ahead stays ahead, so none is later for it. One that does not move, as while its worker computes or waits
for room, holds up nobody for longer than PATIENCE_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 0.5
"""Seconds after which a push that has not moved is not waited for; well below any --timeout."""
AHEAD = 2
"""Buckets that a push may expect beyond those that have come in the slowest one: one that comes and one behind it."""
Race = tuple[int, int]
"""(shard, step) of pushes that keep pace."""


class Runner:
    """The position of one push."""

    def __init__(self, pace: Pace, race: Race | None) -> None:
        self._pace = pace
        self.race = race
        self.expected = 0
        """Buckets that are received or have come."""
        self.came = 0
        self.moved_s = pace.clock()

    def may_expect(self) -> bool:
        """Whether its next bucket may be received now."""
        slowest = self._pace.slowest(self)
        return slowest is None or self.expected < slowest + AHEAD

    def took(self, count: int) -> None:
        """So many of its buckets have come."""
        self.came += count
        self.moved_s = self._pace.clock()
        self._pace.changed()

    async def turn(self) -> None:
        """Wait until may_expect() is worth another look."""
        await self._pace.wait()


class Pace:
    """The pushes of one server that are being received. Used on the server's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._races: dict[Race, list[Runner]] = {}
        self._waiters: list[asyncio.Future[None]] = []

    @contextmanager
    def run(self, race: Race | None) -> Iterator[Runner]:
        """A push while it is received. race: None = it keeps pace with nobody."""
        runner = Runner(self, race)
        if race is None:
            yield runner
            return
        runners = self._races.setdefault(race, [])
        runners.append(runner)
        try:
            yield runner
        finally:
            runners.remove(runner)
            if not runners:
                del self._races[race]
            self.changed()

    def slowest(self, runner: Runner) -> int | None:
        """Buckets that have come in the slowest of the others that move; None = there is none."""
        if runner.race is None:
            return None
        since_s = self.clock() - PATIENCE_S
        others = [one.came for one in self._races[runner.race] if one is not runner and one.moved_s > since_s]
        return min(others, default=None)

    def changed(self) -> None:
        """Some push has moved or ended."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until some push has moved or ended, or those that have not are waited for no longer."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait({waiter}, timeout=PATIENCE_S)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
