"""Servers and workers of the model in chief.py: what goes on by itself while there is no chief."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from shardline.consistency import numbered_pushes, replica_steps
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block, tree_sum
from shardline_chief.rules.state.leases import Lease
from shardline_ps.control.authority import Authority, Term
from tests.protocol_model.numbers import APPLY, Setup, State, advance, gradient, require

Steps = Generator[None, None, Any]


@dataclass(frozen=True, kw_only=True)
class ChiefSetup:
    seed: int
    synchronous: bool = True
    servers: int = 2
    workers: int = 2
    steps: int = 6
    """Steps, or batches."""
    chief_kills: int = 3
    worker_kills: int = 0
    """Workers that die, or are declared dead while they live."""
    server_kills: int = 0
    rage: float = 0.008
    """Share of kills among all that happens, as long as there are some left."""
    # What the model is worth: each of these False is a rule that is a little wrong.
    terms: bool = True
    """Servers obey the chief of the highest term only."""
    note_fences: bool = True
    """A death is in the journal before its work goes to others."""
    note_done: bool = True
    """A finished lease is in the journal before it is acknowledged."""
    note_issued: bool = True
    """A lease is in the journal before it is handed out."""
    same_lease: bool = True
    """Who asks again gets the same lease."""
    note_active_first: bool = True
    """The journal says that a timeline is active before any server admits a push."""
    compare: bool = True
    """What the servers hold is compared with the journal before it is relied on."""
    forget_copies: bool = True
    """Asynchronous copies whose list of finished leases died with their chief are released, not saved."""

    @property
    def numbers(self) -> Setup:
        return Setup(
            seed=self.seed, shards=(1,) * self.servers, replicas=2, workers=self.workers, steps=self.steps, cut_every=2
        )


@dataclass(frozen=True)
class Copy:
    """One shard at a cut."""

    state: State
    step: int
    history: tuple[tuple[int, int], ...] = ()
    last: tuple[tuple[int, int], ...] = ()


@dataclass
class Counts:
    """What happened, so that tests can tell that something did."""

    actions: int = 0
    chiefs: int = 0
    adopted: int = 0
    timelines: int = 0
    refused_commands: int = 0
    fenced: int = 0
    duplicates: int = 0
    steps_alone: int = 0
    """Steps closed while there was no chief."""
    cuts: int = 0
    repeated: int = 0
    asked_again: int = 0

    def add(self, other: Counts) -> None:
        for item in dataclasses.fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Ruler(Protocol):
    """What tasks see of a chief."""

    leading: bool
    timeline: int
    answers: dict[str, int]
    wants_in: dict[str, Worker]

    def current(self, worker: Worker) -> bool: ...

    def replicas(self, worker: Worker) -> tuple[int, ...]: ...

    def lease(self, worker: Worker, done: list[int]) -> Lease | None: ...


class World(Protocol):
    """What tasks see of the model."""

    setup: ChiefSetup
    numbers: Setup
    random: random.Random
    counts: Counts
    servers: list[Server]
    late: list[Callable[[], Outcome]]
    handed_on: set[int]

    @property
    def chief(self) -> Ruler | None: ...

    def born(self) -> int: ...

    def activated(self, timeline: int) -> None: ...


class Refusal(NamedTuple):
    """A command of another term. newer: the server obeys a newer chief."""

    newer: bool


class Server:
    """One ps with one shard of one bucket."""

    def __init__(self, model: World, number: int) -> None:
        self.model, self.number = model, number
        self.process = 0
        self.up = True
        self.lost: set[int] = set()
        """Batches whose update went with a process."""
        self.start()

    def start(self) -> None:
        self.process += 1
        self.up = True
        self.authority = Authority()
        self.state: State | None = None
        self.clear()

    def clear(self) -> None:
        self.step = 0
        self.published: dict[int, float] = {}
        self.counted: dict[int, float] = {}
        self.copies: dict[int, Copy] = {}
        self.released = -1
        self.history: list[tuple[int, int]] = []
        """Asynchronous: (batch, incarnation) of each update applied."""
        self.last: dict[int, int] = {}
        """By incarnation: its last sequence number."""

    def die(self) -> None:
        self.up = False
        self.lost |= {batch for batch, _ in self.history}

    # Commands

    def obey(self, term: Term, order: str, argument: Any) -> Any:
        if order == "lead":
            return self.authority.lead(term)
        if self.model.setup.terms and self.authority.obeys(term).outcome is not Outcome.SERVED:
            self.model.counts.refused_commands += 1
            # A process that nobody has led yet refuses too.
            return Refusal(newer=self.authority.term > term)
        method: Callable[[Any], Any] = getattr(self, f"do_{order}")
        return method(argument)

    def do_status(self, _: None) -> tuple[int, bool, int, tuple[int, ...]]:
        return self.authority.timeline, self.state is not None, self.process, tuple(self.copies)

    def do_configure(self, argument: tuple[int, frozenset[int]]) -> Refusal | None:
        timeline, keep = argument
        if self.number in keep and self.state is None:
            return Refusal(newer=False)  # started again since it was asked
        authority = self.authority
        authority.configured, authority.job, authority.plan_id = True, "job", "plan"
        authority.timeline, authority.active = timeline, False
        if self.number in keep:
            self.copies.clear()
        else:
            self.state = None
            self.clear()
        return None

    def do_members(self, table: dict[str, int]) -> None:
        self.authority.members = dict(table)

    def do_restore(self, argument: tuple[int, tuple[Copy, ...], frozenset[int]]) -> None:
        timeline, copies, keep = argument
        if timeline != self.authority.timeline or self.number in keep:
            return
        copy = copies[self.number]
        self.clear()
        self.state, self.step = copy.state, copy.step
        self.published = {copy.step: copy.state.theta}
        self.history, self.last = list(copy.history), dict(copy.last)

    def do_activate(self, timeline: int) -> None:
        if timeline == self.authority.timeline:
            require(self.state is not None, "a shard without values was activated")
            self.authority.active = True
            self.model.activated(timeline)

    def do_cut(self, argument: tuple[int, int]) -> None:
        timeline, number = argument
        if timeline == self.authority.timeline and self.state is not None:
            self.copies[number] = self.copy()

    def do_release(self, argument: tuple[int, int]) -> None:
        timeline, step = argument
        if timeline == self.authority.timeline:
            self.released = max(self.released, step)
            self.copies = {number: copy for number, copy in self.copies.items() if number > step}

    def copy(self) -> Copy:
        assert self.state is not None
        return Copy(self.state, self.step, tuple(self.history), tuple(self.last.items()))

    # Data

    def refusal(self, worker: Worker, timeline: int) -> Outcome | None:
        if not self.up:
            return Outcome.REFUSED
        found = self.authority.admit(
            job="job", timeline=timeline, plan_id="plan", who=Identity(worker.task, worker.incarnation), init=False
        ).outcome
        if found is Outcome.SERVED:
            handed = worker.incarnation in self.model.handed_on
            require(not handed, f"{worker.task} is admitted after its work was handed on")
            return None
        self.model.counts.fenced += found is Outcome.FENCED
        return found

    def push(self, worker: Worker, timeline: int, step: int, replica: int, value: float) -> Outcome:
        refused = self.refusal(worker, timeline)
        if refused is not None:
            return refused
        replicas = self.model.numbers.replicas
        decision = replica_steps.admit_push(
            step, self.counted, Block(replica, 1), bucket_step=self.step, replicas=replicas
        ).outcome
        self.model.counts.duplicates += decision is Outcome.DUPLICATE
        if decision is Outcome.COUNTED:
            self.counted[replica] = value
            if len(self.counted) == replicas:
                self.publish([self.counted[number] for number in range(replicas)])
        return decision

    def publish(self, values: list[float]) -> None:
        assert self.state is not None
        # tree_sum only adds, so floats do as well as tensors.
        mean = cast(Any, tree_sum)(values) / len(values)
        self.state = advance(self.state, mean, self.step, APPLY)
        self.step += 1
        self.published = {self.step - 1: self.published[self.step - 1], self.step: self.state.theta}
        self.counted.clear()
        if self.step % self.model.numbers.cut_every == 0 and self.step > self.released and len(self.copies) < 2:
            self.copies[self.step] = self.copy()
        self.model.counts.steps_alone += self.model.chief is None

    def push_batch(self, worker: Worker, timeline: int, batch: int, seq: int) -> Outcome:
        refused = self.refusal(worker, timeline)
        if refused is not None:
            return refused
        last = self.last.get(worker.incarnation, 0)
        decision = numbered_pushes.admit_push(seq, last_seq=last).outcome
        if decision is Outcome.APPLIED:
            self.history.append((batch, worker.incarnation))
            self.last[worker.incarnation] = seq
        self.model.counts.duplicates += decision is Outcome.DUPLICATE
        return decision


class Worker:
    """One process of a worker; a restart makes another."""

    def __init__(self, model: World, index: int) -> None:
        self.model, self.index = model, index
        self.task = f"worker/{index}"
        self.stable_id = f"w{index}.{model.born()}"
        self.incarnation = 0
        self.orders: tuple[int, tuple[int, ...]] | None = None
        """(timeline, replicas) as last heard; they hold while there is no chief."""
        self.fenced = False
        self.dead = False
        self.paused = False
        self.program = self.train_sync() if model.setup.synchronous else self.train_async()

    def beat(self, chief: Ruler) -> None:
        """Heartbeat and answer, or the question whether it may join."""
        if not self.incarnation:
            self.incarnation = chief.answers.pop(self.stable_id, 0)
            if not self.incarnation:
                chief.wants_in[self.task] = self
            return
        if not chief.current(self):
            self.fenced = True
        elif chief.leading:
            self.orders = chief.timeline, chief.replicas(self)

    def train_sync(self) -> Steps:
        model = self.model
        while True:
            yield
            if self.orders is None or not self.orders[1]:
                continue
            timeline, replicas = orders = self.orders
            step = yield from self.find(timeline, replicas)
            while step is not None and self.orders == orders and step < model.setup.steps:
                thetas = yield from self.pull(timeline, step, orders)
                if thetas is None or not (yield from self.contribute(timeline, step, replicas, thetas)):
                    break
                step += 1

    def find(self, timeline: int, replicas: tuple[int, ...]) -> Generator[None, None, int | None]:
        steps = []
        for server in self.model.servers:
            yield
            if server.refusal(self, timeline) is not None:
                return None
            steps += [replica_steps.progress(server.step, replica in server.counted) for replica in replicas]
        return min(steps)

    def pull(self, timeline: int, step: int, orders: object) -> Generator[None, None, list[float] | None]:
        thetas: list[float] = []
        while len(thetas) < len(self.model.servers):
            yield
            server = self.model.servers[len(thetas)]
            if self.orders != orders or server.refusal(self, timeline) is not None:
                return None
            outcome = replica_steps.serve_pull(step, bucket_step=server.step, oldest=min(server.published, default=0))
            if outcome is Outcome.OVERTAKEN:
                return None
            if outcome is Outcome.SERVED:
                thetas.append(server.published[step])
        return thetas

    def contribute(
        self, timeline: int, step: int, replicas: tuple[int, ...], thetas: list[float]
    ) -> Generator[None, None, bool]:
        for replica in replicas:
            values = gradient(self.model.numbers, step, replica, thetas)
            for server, value in zip(self.model.servers, values, strict=True):
                yield

                def push(server: Server = server, replica: int = replica, value: float = value) -> Outcome:
                    return server.push(self, timeline, step, replica, value)

                if self.model.random.random() < 0.2:
                    self.model.late.append(push)
                if push() not in (Outcome.COUNTED, Outcome.DUPLICATE):
                    return False
        return True

    def train_async(self) -> Steps:
        model = self.model
        done: list[int] = []
        while True:
            yield
            lease = self.ask(done)
            if lease is None:
                continue
            for batch in range(lease.first, lease.end):
                for server in model.servers:
                    yield from self.push_until_acknowledged(server, batch)
            done = [lease.number]

    def ask(self, done: list[int]) -> Lease | None:
        chief = self.model.chief
        if self.orders is None or chief is None:
            return None
        lease = chief.lease(self, done)
        if self.model.random.random() < 0.2:
            # The answer is lost with its chief or with the connection: the question will come again as it was.
            self.model.counts.asked_again += 1
            return None
        done.clear()
        return lease

    def push_until_acknowledged(self, server: Server, batch: int) -> Steps:
        """The push keeps its number; where the shard has gone back behind it, it is computed anew."""
        seq, timeline = 0, -1
        while True:
            yield
            assert self.orders is not None
            if timeline != self.orders[0]:
                timeline = self.orders[0]
                if server.refusal(self, timeline) is not None:
                    timeline = -1
                    continue
                last = server.last.get(self.incarnation, 0)
                seq = (numbered_pushes.resume(seq, last_seq=last) if seq else None) or last + 1
                continue

            def push(timeline: int = timeline, seq: int = seq) -> Outcome:
                return server.push_batch(self, timeline, batch, seq)

            if self.model.random.random() < 0.2:
                self.model.late.append(push)
            if push() in (Outcome.APPLIED, Outcome.DUPLICATE) and self.model.random.random() < 0.8:
                return
