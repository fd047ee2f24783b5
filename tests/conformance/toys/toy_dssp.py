"""Dynamic stale synchronous parallel, from outside the package: the servers tune how far a worker may run ahead.

Zhao et al.: Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning, ICDCS 2019, algorithms 1 and 2.
A worker that is `least` pushes ahead of the slowest would wait. The fastest may go on for some pushes more, as many as
bring its pause nearest to a push of the slowest, by the last interval of both; never more than `most` ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency import CONSISTENCIES, Clock, Consistency, Gives
from shardline.consistency.base import OWN
from shardline.consistency.intake import LEASED, NUMBERED, BatchChoice, Intake
from shardline.consistency.server import ServerHalf, Terms
from shardline.consistency.ssp import Clocks, PacedByTheSlowest, PacedPushes
from shardline.consistency.worker import WorkerHalf
from shardline.core.spec import JobSpec
from shardline.errors import JobError
from shardline.storage.shard import Storage
from shardline.update.base import Need


@dataclass(frozen=True)
class Dynamic(Consistency):
    """As `ssp`, with a slack between `least` and `most` pushes that the servers choose anew at each pause."""

    name: ClassVar[str] = "dssp"
    clock: ClassVar[Clock] = Clock.VERSION
    batches: ClassVar[BatchChoice] = LEASED
    intake: ClassVar[Intake] = NUMBERED
    gives: ClassVar[frozenset[Gives]] = OWN | {Gives.EQUAL_MOVES}
    tells: ClassVar[frozenset[Need]] = frozenset(Need)
    least: int = 3
    most: int = 15

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise JobError(f"consistency dssp: least is {self.least} and most {self.most}; use 1 <= least <= most")

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return PacedPushes(job)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        """See Consistency."""
        return PacedByTheSlowest(storage, terms, TunedClocks(self.least, self.most))


def more_pushes(now_s: float, interval_s: float, slowest_s: float, slowest_interval_s: float, most: int) -> int:
    """Pushes that the fastest worker may still make, 0 to `most`, so that it pauses nearest to a push of the slowest.

    now_s: time of its last push; slowest_s: that of the slowest worker's. Intervals: between the last two of each.
    """
    ours = [now_s + number * interval_s for number in range(most + 1)]
    theirs = [slowest_s + (number + 1) * slowest_interval_s for number in range(most + 1)]
    return min(range(most + 1), key=lambda number: min(abs(ours[number] - at) for at in theirs))


class TunedClocks(Clocks):
    """Clocks of which the fastest may go beyond the least slack, up to a limit that is set when it would wait."""

    def __init__(self, least: int, most: int, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(least)
        self._most = most
        self._now = now
        self._pushes: dict[str, tuple[float, float]] = {}
        """Time of each worker's last push, and since the one before."""
        self._limits: dict[str, int] = {}
        """The clock up to which a worker need not wait, where it was let go on."""

    def pushed(self, task: str, incarnation: int, clock: int) -> None:
        now = self._now()
        last = self._pushes.get(task, (now, 0.0))[0]
        self._pushes[task] = now, now - last
        clocks = {**self.of, task: clock}
        slowest = min(clocks, key=clocks.__getitem__)
        ahead = clock - clocks[slowest]
        if super().waits(task, ahead) and clock == max(clocks.values()) and clock > self._limits.get(task, 0):
            room = max(0, self._most + 1 - ahead)
            times = self._pushes.get(slowest)
            self._limits[task] = clock - 1 + (more_pushes(*self._pushes[task], *times, room) if times else 0)
        super().pushed(task, incarnation, clock)

    def waits(self, task: str, ahead: int) -> bool:
        return super().waits(task, ahead) and self.of[task] > self._limits.get(task, 0)

    def admit(self, members: Collection[str]) -> None:
        self._limits = {task: limit for task, limit in self._limits.items() if task in members}
        super().admit(members)

    def anew(self) -> None:
        self._limits.clear()
        super().anew()


CONSISTENCIES.add(Dynamic)
