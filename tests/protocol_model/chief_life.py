"""One life of the chief in the model, from the lock to its death; see chief.py.

It is a generator: between two of its actions it may be killed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

from shardline.consistency.assignment import assign, replicas_of
from shardline_chief.rules.replay import Remembered, replay
from shardline_chief.rules.state.leases import Lease, Leases
from shardline_ps.control.authority import Term
from tests.protocol_model.chief_tasks import Copy, Refusal, Server, Steps, Worker, World


class Land(World, Protocol):
    """What the chief sees of the model."""

    terms: int
    journal: list[dict[str, Any]]
    calls: list[Call]
    deaths: int
    acknowledged: set[int]

    def newest_checkpoint(self) -> tuple[int, tuple[Copy, ...]]: ...

    def commit(self, step: int, copies: tuple[Copy, ...], cursor: dict[str, Any] | None) -> None: ...

    def began(self, timeline: int, deaths: int) -> None: ...

    def issue(self, lease: Lease) -> bool: ...


@dataclass
class Call:
    """A command under way to a server."""

    term: Term
    server: Server
    process: int
    order: str
    argument: Any
    answered: bool = False
    answer: Any = None


class Resigned(Exception):
    """A server obeys a newer chief."""


class Chief:
    """One life of the chief."""

    def __init__(self, model: Land) -> None:
        self.model = model
        self.term = Term()
        self.leading = False
        self.timeline = 0
        self.members: dict[str, int] = {}
        self.assignment: dict[int, str] = {}
        self.answers: dict[str, int] = {}
        self.wants_in: dict[str, Worker] = {}
        self.leases: Leases | None = None
        self.processes: dict[int, int] = {}
        self.suspects: set[str] = set()
        self.saved = -1
        self.counter = 0
        self.program = self.live()

    # Memory

    def note(self, kind: str, **fields: Any) -> None:
        """On disk when this returns."""
        self.model.journal.append({"kind": kind, "term": self.term.number, "time": 0.0, **fields})

    def next_number(self) -> int:
        self.counter += 1
        return self.term.number << 32 | self.counter

    # Commands

    def order(self, name: str, argument: Any = None) -> Generator[None, None, dict[int, Any]]:
        """To every server that is up; answers by number, None where its process is gone."""
        model = self.model
        calls = [Call(self.term, s, s.process, name, argument) for s in model.servers if s.up]
        model.calls += calls
        while any(not c.answered and c.server.up and c.server.process == c.process for c in calls):
            yield
            waiting = [c for c in calls if not c.answered]
            if waiting and model.random.random() < 0.1:
                model.calls.append(model.random.choice(waiting))
        if any(call.answer == Refusal(True) or (name == "lead" and call.answer is False) for call in calls):
            raise Resigned
        done = {c.server.number: (c.answer,) for c in calls if c.answered and not isinstance(c.answer, Refusal)}
        return {number: done.get(number) for number in range(len(model.servers))}

    # Life

    def live(self) -> Steps:
        model = self.model
        model.terms += 1
        self.term = Term(model.terms, f"chief {model.terms}")
        yield
        known = replay(model.journal)
        self.note("chief", uuid=self.term.chief_uuid, resume=None, takes_over=known.term > 0)
        self.members = {task: member.incarnation for task, member in known.members.items()}
        self.leases = known.leases
        if not model.setup.synchronous and self.leases is None:
            self.leases = Leases(model.setup.steps)
            self.note("cursor", steps=model.setup.steps, cursor={})
        yield
        if not (yield from self.adopt(known)):
            yield from self.go_back(known)
        while True:
            yield
            yield from self.something()

    def lead(self) -> Steps:
        """More than half of the servers obey, the others are gone."""
        while True:
            led = yield from self.order("lead")
            if 2 * sum(answer is not None for answer in led.values()) > len(led):
                return
            yield

    def adopt(self, known: Remembered) -> Generator[None, None, bool]:
        """Go on with what the servers hold, where that is what the journal says."""
        yield from self.lead()
        if not known.active:
            return False
        self.timeline = known.timeline
        statuses = yield from self.order("status")
        if any(status is None for status in statuses.values()):
            return False
        if self.model.setup.compare and any(
            (timeline, filled) != (known.timeline, True) for ((timeline, filled, _, _),) in statuses.values()
        ):
            return False
        copies = [set(copies) for ((_, _, _, copies),) in statuses.values()]
        answers = yield from self.order("members", dict(self.members))
        if None in answers.values() or None in (yield from self.order("activate", self.timeline)).values():
            return False
        if not self.model.setup.synchronous and set.union(*copies):
            if self.model.setup.forget_copies:
                yield from self.order("release", (self.timeline, max(set.union(*copies))))
            elif set.intersection(*copies):
                yield from self.save(max(set.intersection(*copies)))
        self.processes = {number: process for number, ((_, _, process, _),) in statuses.items()}
        self.model.counts.adopted += 1
        self.begin()
        return True

    def begin(self) -> None:
        self.assignment = assign({}, sorted(self.members), self.model.numbers.replicas)
        self.leading = True

    def go_back(self, known: Remembered | None = None) -> Steps:
        """A new timeline from the newest checkpoint; asynchronous shards that were not lost stay as they are."""
        model = self.model
        self.leading = False
        while True:
            keep: frozenset[int] = frozenset()
            deaths = model.deaths
            yield from self.lead()
            if not all(server.up for server in model.servers):
                yield
                continue
            statuses = yield from self.order("status")
            if any(status is None for status in statuses.values()):
                continue
            now = {number: process for number, ((_, _, process, _),) in statuses.items()}
            if not model.setup.synchronous and (known is None or known.timeline):
                # Shards that the timeline before was still to fill are not whole, those that it took over are.
                whole = known.kept if known is not None and not known.active else frozenset(now)
                values = {n for n, ((_, filled, _, _),) in statuses.items() if filled}
                same = {n for n in now if known is not None or self.processes.get(n) == now[n]}
                keep = frozenset(whole & values & same)
            self.timeline = self.next_number()
            step, copies = model.newest_checkpoint()
            self.note(
                "timeline",
                timeline=self.timeline,
                state="preparing",
                from_cut=step,
                placement=[[n, f"ps/{n}", f"h:{n}"] for n in range(len(model.servers))],
                keep=sorted(keep),
            )
            model.began(self.timeline, deaths)
            # If this attempt fails too, what it took over is all that is whole.
            known = dataclasses.replace(replay(model.journal), active=False)
            yield
            if (yield from self.fill(copies, keep)):
                break
        self.processes = now
        model.counts.timelines += 1
        self.begin()

    def fill(self, copies: tuple[Copy, ...], keep: frozenset[int]) -> Generator[None, None, bool]:
        orders: list[tuple[str, Any]] = [
            ("configure", (self.timeline, keep)),
            ("members", dict(self.members)),
            ("restore", (self.timeline, copies, keep)),
        ]
        for name, argument in orders:
            if None in (yield from self.order(name, argument)).values():
                return False
        if self.model.setup.note_active_first:
            self.note("timeline", timeline=self.timeline, state="active")
            self.model.activated(self.timeline)
            yield
        if None in (yield from self.order("activate", self.timeline)).values():
            return False
        if not self.model.setup.note_active_first:
            self.begin()
            yield
            self.note("timeline", timeline=self.timeline, state="active")
        return True

    def something(self) -> Steps:
        """One thing that a chief does, if there is one to do."""
        model = self.model
        if any(not s.up or s.process != self.processes[s.number] for s in model.servers):
            yield from self.go_back()
        elif self.wants_in:
            _, worker = self.wants_in.popitem()
            yield from self.admit(worker)
        elif self.suspects:
            yield from self.fence(self.suspects.pop())
        elif model.random.random() < 0.3:
            yield from self.checkpoint()

    # Members

    def replicas(self, worker: Worker) -> tuple[int, ...]:
        return replicas_of(self.assignment, worker.task)

    def current(self, worker: Worker) -> bool:
        return self.members.get(worker.task) == worker.incarnation

    def admit(self, worker: Worker) -> Steps:
        if worker.dead or worker.incarnation:
            return
        old = self.members.get(worker.task)
        if old is not None:
            yield from self.fence(worker.task)
        incarnation = self.next_number()
        self.members[worker.task] = incarnation
        self.note(
            "member",
            task=worker.task,
            incarnation=incarnation,
            stable_id=worker.stable_id,
            address="",
            metrics_address="",
        )
        yield
        if None not in (yield from self.order("members", dict(self.members))).values():
            self.assignment = assign(self.assignment, sorted(self.members), self.model.numbers.replicas)
        self.answers[worker.stable_id] = incarnation

    def fence(self, task: str) -> Steps:
        """Noted, known to every server, and only then its work goes to others."""
        incarnation = self.members.pop(task, None)
        if incarnation is None:
            return
        if self.model.setup.note_fences:
            self.note("gone", task=task, incarnation=incarnation)
            yield
        if None in (yield from self.order("members", dict(self.members))).values():
            # A server is gone: whoever fills it sends the table again, before anything goes on.
            yield from self.go_back()
        self.model.handed_on.add(incarnation)
        if self.leases is not None:
            self.leases.fence(incarnation)
        self.assignment = assign(self.assignment, sorted(self.members), self.model.numbers.replicas)

    # Batches

    def lease(self, worker: Worker, done: list[int]) -> Lease | None:
        """One turn of the chief: note, then answer."""
        model = self.model
        if not self.current(worker) or self.leases is None:
            return None
        noted = [number for number in done if self.leases.finish(number, worker.incarnation)]
        lease = None
        if self.leading and not self.leases.all_done:
            held = self.leases.held_by(worker.incarnation) if model.setup.same_lease else None
            lease = held or self.leases.take(worker.incarnation, workers=len(self.members))
        fresh = lease is not None and model.issue(lease)
        self.note(
            "lease",
            incarnation=worker.incarnation,
            done=noted if model.setup.note_done else [],
            issued=[lease.number, lease.first, lease.count]
            if lease is not None and fresh and model.setup.note_issued
            else None,
        )
        model.acknowledged.update(noted)
        return lease

    # Checkpoints

    def checkpoint(self) -> Steps:
        model = self.model
        if model.setup.synchronous:
            held = set.intersection(*(set(server.copies) for server in model.servers if server.up))
            if held:
                yield from self.save(min(held))
            return
        assert self.leases is not None
        cursor = self.leases.cursor()
        number = max(self.saved, model.newest_checkpoint()[0]) + 1
        if None not in (yield from self.order("cut", (self.timeline, number))).values():
            yield from self.save(number, cursor)

    def save(self, step: int, cursor: dict[str, Any] | None = None) -> Steps:
        """Fetch, rename, note, release."""
        model = self.model
        copies = []
        for server in model.servers:
            yield
            if not server.up or step not in server.copies or server.authority.timeline != self.timeline:
                return
            copies.append(server.copies[step])
        if self.leases is not None and cursor is None:
            cursor = self.leases.cursor()
        model.commit(step, tuple(copies), cursor)
        self.saved = step
        yield
        self.note("cut", step=step, path=f"/out/{step}", timeline=self.timeline)
        yield
        yield from self.order("release", (self.timeline, step))
