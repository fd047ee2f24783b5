"""A chief that dies at any point and comes back, while workers and servers go on or die too (PROTOCOL 1.2, 1.3, 1.6).

    ChiefModel(ChiefSetup(seed=7, chief_kills=3)).run()

Servers obey by the real Authority, the journal is read by the real replay(), batches are handed out by the real Leases,
pushes are judged by shardline.consistency. What a chief had sent when it died still arrives, maybe long after.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from shardline.core.outcome import Outcome
from shardline_chief.rules.state.leases import Lease
from tests.protocol_model.chief_life import Call, Chief, Resigned
from tests.protocol_model.chief_tasks import ChiefSetup, Copy, Counts, Server, Worker
from tests.protocol_model.numbers import reference, require

LIMIT = 15_000
"""Actions after which a schedule counts as stuck; most take 4,000."""


class ChiefModel:
    """The cluster. run() plays one schedule to its end and checks the promises on the way."""

    def __init__(self, setup: ChiefSetup) -> None:
        self.setup = setup
        self.numbers = setup.numbers
        self.random = random.Random(setup.seed)
        self.counts = Counts()
        self.expected = reference(self.numbers)
        self.journal: list[dict[str, Any]] = []
        self.terms = 0
        self._born = 0
        self.chief: Chief | None = None
        self.calls: list[Call] = []
        self.orphaned: list[Call] = []
        """Of chiefs that died."""
        self.late: list[Callable[[], Outcome]] = []
        first = tuple(Copy(state, 0) for state in self.expected[0])
        self.checkpoints: dict[int, tuple[Copy, ...]] = {0: first}
        self.servers = [Server(self, number) for number in range(setup.servers)]
        self.workers = [Worker(self, index) for index in range(setup.workers)]
        self.chief_kills, self.worker_kills = setup.chief_kills, setup.worker_kills
        self.server_kills = setup.server_kills
        self.handed_on: set[int] = set()
        """Incarnations whose replicas or leases somebody else may have."""
        self.issued: dict[int, set[int]] = {}
        """By batch: the numbers of the leases it was in."""
        self.acknowledged: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self.deaths = 0
        """Of servers."""
        self._begun: dict[int, int] = {}
        """By timeline: deaths that it was begun for."""
        self._covered = -1
        """Deaths that the newest active timeline was begun for."""

    def born(self) -> int:
        self._born += 1
        return self._born

    def run(self) -> Counts:
        while not self.finished:
            self.counts.actions += 1
            require(self.counts.actions < LIMIT, f"stuck after {LIMIT} actions")
            self.act()
        self.check()
        return self.counts

    @property
    def finished(self) -> bool:
        if self.setup.synchronous:
            return all(s.up and s.authority.active and s.step == self.setup.steps for s in self.servers)
        chief = self.chief
        whole = chief is not None and chief.leading and chief.leases is not None and chief.leases.all_done
        return whole and all(s.up and s.authority.active for s in self.servers)

    def act(self) -> None:
        dice = self.random.random()
        if dice < self.setup.rage:
            self.kill()
        elif dice < self.setup.rage + 0.012:
            self.revive()
        elif dice < 0.35:
            if self.calls:
                self.deliver(self.calls)
        elif dice < 0.36:
            if self.orphaned:
                self.deliver(self.orphaned)
        elif dice < 0.37:
            if self.late:
                self.late.pop(self.random.randrange(len(self.late)))()
        elif dice < 0.47:
            self.beat()
        elif dice < 0.72:
            self.lead()
        else:
            self.work()

    def kill(self) -> None:
        dice = self.random.random()
        if dice < 0.4 and self.chief is not None and self.chief_kills:
            self.chief_kills -= 1
            self.end_chief()
        elif dice < 0.5 and self.server_kills and all(server.up for server in self.servers):
            self.server_kills -= 1
            self.deaths += 1
            self.random.choice(self.servers).die()
        elif dice > 0.5 and self.worker_kills:
            self.worker_kills -= 1
            self.hurt(self.random.randrange(self.setup.workers))

    def revive(self) -> None:
        """A server is started again, a worker goes on that stood still."""
        for server in self.servers:
            if not server.up:
                server.start()
        paused = [worker for worker in self.workers if worker.paused]
        if paused and self.random.random() < 0.3:
            paused[0].paused = False

    def hurt(self, index: int) -> None:
        """It dies and is started again, or stands still for so long that it is taken for dead."""
        if self.random.random() < 0.5:
            self.workers[index].dead = True
            self.workers[index] = Worker(self, index)
        else:
            self.workers[index].paused = True

    def end_chief(self) -> None:
        """What it has sent may still arrive, long after."""
        self.chief = None
        self.orphaned += self.calls
        self.calls = []

    def deliver(self, calls: list[Call]) -> None:
        """A command arrives, maybe not for the last time while its chief waits or after it died."""
        call = calls.pop(self.random.randrange(len(calls)))
        if not call.server.up or call.server.process != call.process or (call.answered and calls is self.calls):
            return
        if self.random.random() < 0.2:
            calls.append(call)
        call.answer, call.answered = call.server.obey(call.term, call.order, call.argument), True

    def beat(self) -> None:
        """A heartbeat, or the lack of one."""
        if self.chief is None:
            return
        index = self.random.randrange(self.setup.workers)
        worker = self.workers[index]
        if worker.paused:
            if self.chief.leading and self.chief.current(worker) and self.random.random() < 0.2:
                self.chief.suspects.add(worker.task)
            return
        worker.beat(self.chief)
        if worker.fenced:
            self.workers[index] = Worker(self, index)

    def lead(self) -> None:
        if self.chief is None:
            if self.random.random() < 0.05:
                self.chief = Chief(self)
                self.counts.chiefs += 1
            return
        try:
            next(self.chief.program)
        except Resigned:
            self.end_chief()

    def work(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.incarnation and not worker.paused:
            next(worker.program)

    # What is kept

    def newest_checkpoint(self) -> tuple[int, tuple[Copy, ...]]:
        return max(self.checkpoints.items())

    def commit(self, step: int, copies: tuple[Copy, ...], cursor: dict[str, Any] | None) -> None:
        """The rename. A step that is there already must have the same content (synchronous)."""
        self.counts.cuts += 1
        if self.setup.synchronous:
            states = tuple(copy.state for copy in copies)
            require(states == self.expected[step], f"the checkpoint of step {step} is not the state of that step")
        assert self.setup.synchronous or cursor is not None
        for first, end in cursor["done"] if cursor is not None else ():
            for server, copy in zip(self.servers, copies, strict=True):
                inside = {batch for batch, _ in copy.history} | server.lost
                missing = set(range(first, end)) - inside
                require(not missing, f"the checkpoint counts batches {sorted(missing)} as done, a shard lacks them")
        self.checkpoints[step] = copies

    def began(self, timeline: int, deaths: int) -> None:
        require(deaths > self._covered, f"timeline {timeline:#x} begins although no server was lost")
        self._begun[timeline] = deaths

    def issue(self, lease: Lease) -> bool:
        """Whether it is another one than before."""
        known = self._leases.get(lease.number)
        if known == lease:
            return False
        require(known is None, f"lease number {lease.number} was given twice")
        self._leases[lease.number] = lease
        for batch in range(lease.first, lease.end):
            earlier = self.issued.setdefault(batch, set())
            require(not earlier & self.acknowledged, f"batch {batch} is handed out after it was acknowledged")
            earlier.add(lease.number)
        return True

    def activated(self, timeline: int) -> None:
        self._covered = max(self._covered, self._begun[timeline])

    def check(self) -> None:
        if self.setup.synchronous:
            states = tuple(server.state for server in self.servers)
            require(states == self.expected[-1], "the job ends in other bits")
            return
        chief = self.chief
        assert chief is not None
        assert chief.leases is not None
        again = sum(len(leases) - 1 for leases in self.issued.values())
        require(
            chief.leases.repeated == again,
            f"{again} batches were handed out again, {chief.leases.repeated} are counted",
        )
        self.counts.repeated += again
        for server in self.servers:
            seen = {batch for batch, _ in server.history} | server.lost
            require(seen == set(range(self.setup.steps)), f"shard {server.number} never saw some batches")
