"""Bounded staleness (PROTOCOL 1.5): workers wait for slower ones, under deaths and rollbacks, until the last batch.

The clocks are those of the parameter server. A worker's step is one push to every shard; it is over when every shard
has counted it and has answered the pull. The chief's part is a table of members, which shards get one by one, and a
pool of batches.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from shardline.consistency.numbered_pushes import admit_push
from shardline.consistency.ssp import Clocks
from shardline.core.outcome import Outcome
from tests.conformance.toys.toy_dssp import TunedClocks
from tests.protocol_model.numbers import require

LIMIT = 30_000
"""Actions after which a schedule counts as stuck; most take 2,000."""
MOST_BATCHES = 3
"""Of one lease."""


@dataclass(frozen=True, kw_only=True)
class PacedSetup:
    seed: int
    slack: int = 2
    least: int = 0
    """Of a slack that the servers tune, up to `slack`; 0 = they don't."""
    shards: int = 2
    workers: int = 3
    batches: int = 30
    kills: int = 0
    losses: int = 0
    """Timelines that end: one shard goes back, or its standby takes over."""
    slow: int = 1
    """Worker 0 acts once where the others act so many times."""
    rests: bool = True
    """Whether a worker without work says so."""
    told: bool = True
    """Whether a worker tells its clock, or each shard counts for itself."""


@dataclass(eq=False)
class PacedWorker:
    number: int
    incarnation: int
    timeline: int
    clock: int = 0
    batches: list[int] = field(default_factory=list)
    """Of its lease, not acknowledged yet."""
    asks: list[int] = field(default_factory=list)
    """Shards still to be asked for the place to begin."""
    rests: list[int] = field(default_factory=list)
    """Shards that are still to learn that it rests."""
    pending: set[int] = field(default_factory=set)
    """Shards that have not counted its push."""
    waits: set[int] = field(default_factory=set)
    """Shards that have not answered its pull."""
    seqs: dict[int, int] = field(default_factory=dict)
    resting: bool = False

    @property
    def task(self) -> str:
        return f"worker/{self.number}"

    @property
    def computing(self) -> bool:
        return not (self.asks or self.rests or self.resting) and bool(self.batches)


class PacedPush(NamedTuple):
    worker: PacedWorker
    timeline: int
    shard: int
    seq: int
    clock: int


@dataclass(eq=False)
class PacedShard:
    clocks: Clocks
    timeline: int = 1
    table: dict[int, int] = field(default_factory=dict)
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    applying: PacedPush | None = None
    """Admitted, and not counted yet."""


@dataclass
class PacedCounts:
    actions: int = 0
    pushes: int = 0
    held: int = 0
    """Pulls that had to wait when they were first asked for."""
    fenced: int = 0
    rests: int = 0
    timelines: int = 0
    spread: int = 0
    """Most pushes that a worker was ahead of another one when it went on."""

    def add(self, other: PacedCounts) -> None:
        spread = max(self.spread, other.spread)
        for item in dataclasses.fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.spread = spread


class PacedModel:
    """run() plays one schedule until every batch is done."""

    def __init__(self, setup: PacedSetup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.counts = PacedCounts()
        self.timeline = 1
        self.incarnations = setup.workers
        self.workers = {n: PacedWorker(n, n + 1, 1) for n in range(setup.workers)}
        self.shards = [PacedShard(self.clocks()) for _ in range(setup.shards)]
        self.free = list(range(setup.batches))
        self.done: set[int] = set()
        self.net: list[PacedPush] = []
        self.tables: list[tuple[int, dict[int, int]]] = []
        """(shard, table) that are still to arrive, in the order of sending."""
        self.handed: list[tuple[list[int], PacedWorker | None]] = []
        """What follows once all tables have arrived: a dead worker's batches are free, a new life may begin."""
        self.kills, self.losses = setup.kills, setup.losses
        for worker in self.workers.values():
            self.start(worker)
        for shard in self.shards:
            self.admit_members(shard, self.table)

    def clocks(self) -> Clocks:
        if not self.setup.least:
            return Clocks(self.setup.slack)
        return TunedClocks(self.setup.least, self.setup.slack, now=lambda: float(self.counts.actions))

    @property
    def table(self) -> dict[int, int]:
        return {number: worker.incarnation for number, worker in self.workers.items()}

    def admit_members(self, shard: PacedShard, table: dict[int, int]) -> None:
        shard.table = table
        shard.clocks.admit([f"worker/{number}" for number in table])

    def run(self) -> PacedCounts:
        while len(self.done) < self.setup.batches:
            self.counts.actions += 1
            require(self.counts.actions < LIMIT, f"stuck after {LIMIT} actions")
            self.act()
        return self.counts

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.01 and self.kills and self.workers:
            self.kills -= 1
            self.kill(self.random.choice(list(self.workers.values())))
        elif dice < 0.015 and self.losses and not self.tables:
            self.losses -= 1
            self.new_timeline()
        elif dice < 0.1 and self.tables:
            number, table = self.tables.pop(0)
            self.admit_members(self.shards[number], table)
            if not self.tables:
                self.hand_over()
        elif dice < 0.3:
            self.apply(self.random.choice(self.shards))
        elif dice < 0.55 and self.net:
            self.deliver()
        elif self.workers:
            worker = self.random.choice(list(self.workers.values()))
            if worker.number or not self.random.randrange(self.setup.slow):
                self.work(worker)

    # The chief

    def kill(self, worker: PacedWorker) -> None:
        """It leaves the table, or its next life takes its place at once."""
        del self.workers[worker.number]
        self.incarnations += 1
        fresh = PacedWorker(worker.number, self.incarnations, self.timeline)
        at_once = self.random.random() < 0.5
        table = {**self.table, **({fresh.number: fresh.incarnation} if at_once else {})}
        self.tables += [(number, table) for number in range(self.setup.shards)]
        self.handed.append((worker.batches, fresh if at_once else None))
        if not at_once:
            table = {**table, fresh.number: fresh.incarnation}
            self.tables += [(number, table) for number in range(self.setup.shards)]
            self.handed.append(([], fresh))

    def hand_over(self) -> None:
        """Every shard has the newest table."""
        for batches, fresh in self.handed:
            self.free += batches
            if fresh is not None and (self.random.random() < 0.7 or len(self.workers) < 2):
                fresh.timeline = self.timeline
                self.start(fresh)
                self.workers[fresh.number] = fresh
        self.handed.clear()
        if set(self.table) != set(self.shards[0].table):
            # Somebody died again before its life began.
            self.tables += [(number, self.table) for number in range(self.setup.shards)]

    def new_timeline(self) -> None:
        """All shards begin without clocks, those that keep their values too."""
        self.timeline += 1
        self.counts.timelines += 1
        for shard in self.shards:
            shard.timeline = self.timeline
            shard.clocks.admit(())
            self.admit_members(shard, self.table)

    # Workers

    def start(self, worker: PacedWorker) -> None:
        worker.asks, worker.rests, worker.resting = list(range(self.setup.shards)), [], False
        worker.pending, worker.waits = set(), set()

    def work(self, worker: PacedWorker) -> None:
        if worker.timeline != self.timeline:
            worker.timeline, worker.clock = self.timeline, 0
            self.start(worker)
        elif worker.asks:
            number = worker.asks[-1]
            shard = self.shards[number]
            if not self.begin(worker, shard):
                return
            worker.asks.pop()
            worker.clock = max(worker.clock, shard.clocks.least)
            worker.seqs[number] = shard.last[worker.number][1] if self.known(worker, shard) else 0
        elif worker.rests:
            self.shards[worker.rests.pop()].clocks.rest(worker.task)
        elif not worker.batches:
            self.lease(worker)
        elif not worker.waits:
            worker.pending, worker.waits = set(range(self.setup.shards)), set(range(self.setup.shards))
        elif worker.pending:
            number = self.random.choice(sorted(worker.pending))
            self.net.append(PacedPush(worker, worker.timeline, number, worker.seqs[number] + 1, worker.clock + 1))
            if self.random.random() < 0.05:
                # The lane is tried: is anybody there?
                self.begin(worker, self.shards[number])
        else:
            self.pull(worker)

    def begin(self, worker: PacedWorker, shard: PacedShard) -> bool:
        """Whether the shard takes notice: one that does not know this life of the worker sends it away."""
        known = shard.table.get(worker.number) == worker.incarnation
        if known:
            shard.clocks.begin(worker.task, worker.incarnation)
        return known

    def known(self, worker: PacedWorker, shard: PacedShard) -> bool:
        return shard.last.get(worker.number, (0, 0))[0] == worker.incarnation

    def lease(self, worker: PacedWorker) -> None:
        if self.free:
            worker.batches, self.free = self.free[:MOST_BATCHES], self.free[MOST_BATCHES:]
            if worker.resting:
                self.start(worker)
        elif not worker.resting and self.setup.rests:
            worker.resting = True
            worker.rests = list(range(self.setup.shards))
            self.counts.rests += 1

    def pull(self, worker: PacedWorker) -> None:
        number = self.random.choice(sorted(worker.waits))
        if worker.task in self.shards[number].clocks.held:
            self.counts.held += 1
            return
        worker.waits.discard(number)
        if not worker.waits:
            worker.clock += 1
            worker.seqs = {number: seq + 1 for number, seq in worker.seqs.items()}
            self.done.add(worker.batches.pop(0))
            self.check(worker)

    def check(self, worker: PacedWorker) -> None:
        for other in self.workers.values():
            if other.computing and other.timeline == worker.timeline == self.timeline:
                # Its push may be counted though it does not know yet.
                ahead = worker.clock - other.clock - (len(other.waits) > 0)
                self.counts.spread = max(self.counts.spread, ahead)
                require(not self.setup.told or ahead <= self.setup.slack, f"{worker.task} is {ahead} pushes ahead")

    # The network and the shards

    def deliver(self) -> None:
        n = self.random.randrange(len(self.net))
        push = self.net[n]
        if self.random.random() < 0.7:
            self.net[n] = self.net[-1]
            self.net.pop()
        shard = self.shards[push.shard]
        if shard.applying is not None:
            return
        if shard.table.get(push.worker.number) != push.worker.incarnation:
            self.counts.fenced += 1
        elif push.timeline == shard.timeline:
            shard.applying = push

    def apply(self, shard: PacedShard) -> None:
        push, shard.applying = shard.applying, None
        if push is None or push.timeline != shard.timeline:
            return
        worker = push.worker
        last = shard.last[worker.number][1] if self.known(worker, shard) else 0
        outcome = admit_push(push.seq, last_seq=last).outcome
        if outcome is Outcome.APPLIED:
            self.counts.pushes += 1
            shard.last[worker.number] = (worker.incarnation, push.seq)
            clock = push.clock if self.setup.told else shard.clocks.of.get(worker.task, 0) + 1
            refused = shard.clocks.why_not(worker.task, worker.incarnation, clock)
            require(not refused, refused)
            shard.clocks.pushed(worker.task, worker.incarnation, clock)
        open_push = worker.seqs.get(push.shard, 0) + 1 == push.seq
        if outcome in (Outcome.APPLIED, Outcome.DUPLICATE) and open_push and self.random.random() < 0.8:
            worker.pending.discard(push.shard)
