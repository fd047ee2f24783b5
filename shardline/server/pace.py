"""Pushes of one step keep pace, so that their buckets close one after another.

A bucket closes when every replica is counted in it, so what others are far from is of no use yet. TCP shares a link
unevenly: without a rule one worker has sent everything when another is in the middle, and until then hardly anything
can be pulled. So a push that is ahead is not received from: its socket fills, its worker stops sending, and the link is
left to those behind.

What counts is what has come while both moved: a push that began long before another, perhaps since its own link is
slow, keeps its lead and is not held back for it. One that does not move, as while its worker computes or waits for
room, holds up nobody for longer than the patience; and none is held up for longer than twice that, because its worker
waits for its socket to take more, and gives up in the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 0.5
"""Seconds after which a push that has not moved is not waited for, unless the timeouts call for fewer."""
AHEAD = 2
"""Buckets that a push may expect beyond those that have come in the slowest one: one that comes and one behind it."""
Race = tuple[int, int]
"""(shard, step) of pushes that keep pace."""


class Runner:
    def __init__(self, pace: Pace, race: Race) -> None:
        self._pace = pace
        self.race = race
        self.expected = 0
        """Buckets that are received or have come."""
        self.came = 0
        self.beside = self._level()
        """The same, counted from where the slowest was when this one began, or moved again."""
        self.moved_s = pace.clock()

    def may_expect(self) -> bool:
        """Whether its next bucket may be received now. Some push always may, or has buckets coming."""
        if self._pace.clock() - self.moved_s > 2 * self._pace.patience_s:
            return True
        coming = self.expected - self.came
        return not any(
            self.expected >= other.came + AHEAD and self.beside + coming >= other.beside + AHEAD
            for other in self._pace.moving(self)
        )

    def took(self, count: int) -> None:
        """So many of its buckets have come."""
        if not self._pace.moves(self):
            self.beside = max(self.beside, self._level())
        self.came += count
        self.beside += count
        self.moved_s = self._pace.clock()
        self._pace.changed()

    def _level(self) -> int:
        """Where the slowest of the others is, or the fastest if none moves: it is not to wait for this one later."""
        moving = self._pace.moving(self)
        if moving:
            return min(other.beside for other in moving)
        return max((other.beside for other in self._pace.others(self)), default=0)

    async def turn(self) -> None:
        """Wait until may_expect() is worth another look."""
        await self._pace.wait()


class Pace:
    """The pushes of one server that are being received. Used on the server's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.patience_s = PATIENCE_S
        """Twice that must be well below the time in which a worker's socket has to take something."""
        self._races: dict[Race, list[Runner]] = {}
        self._waiters: list[asyncio.Future[None]] = []

    @contextmanager
    def run(self, race: Race) -> Iterator[Runner]:
        """A push while it is received."""
        runner = Runner(self, race)
        runners = self._races.setdefault(race, [])
        runners.append(runner)
        try:
            yield runner
        finally:
            runners.remove(runner)
            if not runners:
                del self._races[race]
            self.changed()

    def moves(self, runner: Runner) -> bool:
        """Whether some bucket of a push has come of late."""
        return runner.moved_s > self.clock() - self.patience_s

    def moving(self, runner: Runner) -> list[Runner]:
        return [one for one in self.others(runner) if self.moves(one)]

    def others(self, runner: Runner) -> list[Runner]:
        return [one for one in self._races.get(runner.race, ()) if one is not runner]

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
            await asyncio.wait({waiter}, timeout=self.patience_s)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
