"""A cluster without a network: servers that answer the chief's commands, and a clock moved by tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardline.core.choices import Choices
from shardline.core.image import WorkerSequence
from shardline.core.orders import Orders, Phase
from shardline.core.spec import ConsistencySpec, JobSpec, TensorSpec
from shardline.core.status import HeldCut, PsStatus, ShardStatus, StandbyStatus
from shardline.core.timeouts import Timeouts
from shardline.errors import CheckpointError, FencedError, ProtocolError, ShardlineError, UnreachableError, UsageError
from shardline_chief.rules.actions import (
    Action,
    Activate,
    Answer,
    AskStatus,
    Command,
    CommandResult,
    Configure,
    Cut,
    Find,
    Finish,
    Found,
    JournalLine,
    Lead,
    MarkBest,
    Members,
    Order,
    Promote,
    Release,
    Restore,
    Save,
    Saved,
    Say,
    Tell,
)
from shardline_chief.rules.messages import Beat, Join, JoinAnswer
from shardline_chief.rules.program import Program
from shardline_chief.rules.state.settings import ChiefSettings
from tests.support.builders import make_job_spec

T = 60.0
JOIN = 3 * T


def make_job(**changes: Any) -> JobSpec:
    """A job of a hundred steps with tensors for two servers."""
    mode = changes.pop("mode", "sync")
    fields: dict[str, Any] = {
        "tensors": (
            TensorSpec(name="weight", shape=(64, 4), dtype="float32"),
            TensorSpec(name="bias", shape=(64,), dtype="float32"),
        ),
        "consistency": ConsistencySpec(mode=mode),
        "replicas": 1 if mode == "async" else 4,
        "steps": 100,
    }
    return make_job_spec(**{**fields, **changes})


@dataclass
class FakeResume:
    """A checkpoint to resume from."""

    step: int = 40
    path: str = "/out/checkpoints/step-00000040"
    cursor: dict[str, Any] = field(default_factory=dict)
    versions: tuple[int, ...] = (40, 40)
    sequences: tuple[Mapping[str, WorkerSequence], ...] = ({}, {})
    owes: bool = False
    refuses: str = ""
    notes: tuple[str, ...] = ()

    def check(self, job: JobSpec) -> tuple[str, ...]:
        if self.refuses:
            raise CheckpointError(self.refuses)
        return self.notes


@dataclass
class FakePs:
    """One server with one shard."""

    number: int
    step: int = 0
    version: int = 0
    timeline: int = 0
    initialized: bool = False
    active: bool = False
    stop: int | None = None
    members: dict[str, int] = field(default_factory=dict)
    cuts: dict[int, HeldCut] = field(default_factory=dict)
    dead: bool = False
    asynchronous: bool = False
    kept: bool = False
    passes: int = 0
    """Number of Cut commands that come too late."""
    failure: str = ""
    waiting_for: tuple[int, ...] = ()
    restored: int = 40
    """Step of the checkpoint that Restore uses."""
    shards: tuple[int, ...] = ()
    room: int = 8
    """Most shards that it can hold, including standbys."""
    standbys: dict[int, str] = field(default_factory=dict)
    """Server of the standby, by shard whose primary is here."""
    standby_state: str = "synced"
    held: tuple[int, ...] = ()
    """Shards whose standby is here."""
    refuses: str = ""
    """Why it refuses to have a standby promoted; empty if it does not."""
    copies: dict[int, int] = field(default_factory=dict)
    """Appointment of each standby copied here, by shard, until this server is ordered to drop it."""
    took_over: bool = False
    led: bool = False
    choices: Choices = field(default_factory=Choices)
    """With spares: what it reports as the lead; Release shortens it."""

    @property
    def task(self) -> str:
        return f"ps/{self.number}"

    def status(self) -> PsStatus:
        shard = ShardStatus(
            shard=self.number,
            step_min=self.step,
            step_max=self.step,
            version=self.version,
            initialized=self.initialized,
            waiting_for=self.waiting_for,
            cuts=tuple(self.cuts.values()),
            choices=self.choices,
        )
        # A server that took over another's shards reports the same state for all of them.
        held = [
            dataclasses.replace(
                shard,
                shard=number,
                standby=self.standby_state if self.standbys.get(number) and self.active else "",
                standby_task=self.standbys.get(number, ""),
            )
            for number in (self.shards if self.held or self.took_over else self.shards or (self.number,))
        ]
        return PsStatus(
            task=self.task,
            timeline=self.timeline,
            shards=tuple(held) if self.timeline else (),
            failure=self.failure,
            standbys=tuple(
                StandbyStatus(shard=number, synced=not self.refuses, appointment=self.copies.get(number, 0))
                for number in self.held
            ),
        )

    def advance(self, step: int) -> None:
        """Close steps until `step`, but not past the stop step, cutting as requested."""
        target = step if self.stop is None else min(step, self.stop)
        for wanted in list(self.cuts.values()):
            if not wanted.complete and self.step <= wanted.step <= target:
                self.cuts[wanted.step] = HeldCut(step=wanted.step, complete=True)
        self.step = self.version = max(self.step, target)

    def obey(self, order: Order) -> Any:
        if self.dead:
            raise UnreachableError(f"{self.task} did not answer")
        if not self.led and not isinstance(order, Lead):
            raise FencedError(f"{self.task}: this ps obeys the chief of term 0")
        match order:
            case Lead():
                self.led = True
                return self.timeline
            case Configure():
                shards = tuple(place.shard for place in order.placement if place.task == self.task)
                if len(shards) + sum(p.standby_task == self.task for p in order.placement) > self.room:
                    raise UsageError("the shards of this ps need more than there is")
                self.standbys = {p.shard: p.standby_task for p in order.placement if p.task == self.task}
                self._hold(order)
                if self.timeline == order.timeline and self.shards == shards:
                    return 1000
                self.timeline, self.active, self.shards = order.timeline, False, shards
                self.asynchronous = order.job.consistency.mode == "async"
                self.kept = bool(shards) and set(shards) <= order.keep
                if not self.kept:
                    self.initialized, self.step, self.version, self.cuts, self.stop = False, 0, 0, {}, None
                return 1000
            case Members():
                self.members = dict(order.members)
                return 0
            case Promote():
                mine = {shard: heir.appointment for shard, heir in order.shards.items() if heir.task == self.task}
                if mine and self.refuses:
                    raise ProtocolError(self.refuses)
                if any(self.copies.get(shard) != number for shard, number in mine.items() if shard not in self.shards):
                    raise ProtocolError("the standby was copied for another appointment")
                if mine:
                    assert set(mine) <= {*self.held, *self.shards}
                    self.timeline, self.active = order.timeline, False
                    self.shards = tuple(sorted({*self.shards, *mine}))
                    self.held = tuple(shard for shard in self.held if shard not in mine)
                    self.took_over = self.initialized = True
            case Restore():
                if not self.kept:
                    self.initialized = True
                    self.step = self.version = self.restored
            case Activate():
                assert self.initialized or not self.shards
                self.active = True
            case Cut():
                return self._cut(order)
            case Release():
                self.cuts = {step: cut for step, cut in self.cuts.items() if step > order.step}
                self.choices = self.choices.since(order.noted)
            case AskStatus():
                return self.status()
        return None

    def _hold(self, order: Configure) -> None:
        """Keep the standbys to be kept; copy the others from their primaries at once."""
        mine = {place.shard: place.appointment for place in order.placement if place.standby_task == self.task}
        kept = {n: held for n, held in self.copies.items() if n in order.keep_standbys and mine.get(n) == held}
        self.held, self.copies = tuple(mine), {**mine, **kept}

    def _cut(self, order: Cut) -> tuple[bool, int]:
        if order.timeline != self.timeline:
            raise ProtocolError(f"Cut is for timeline {order.timeline:#x}, this ps is at {self.timeline:#x}")
        if self.passes > 0 or (not self.asynchronous and order.step < self.step):
            self.passes -= 1
            return True, self.step
        if order.stop:
            self.stop = order.step
        whole = self.asynchronous or order.step == self.step
        self.cuts[order.step] = HeldCut(step=order.step, complete=whole)
        return False, self.step


class Cluster:
    """The program and its environment."""

    sequences: Mapping[str, WorkerSequence] = MappingProxyType({})
    """Last pushes of workers in each shard of the newest checkpoint."""

    def __init__(
        self,
        *,
        job: JobSpec | None = None,
        ps: int = 2,
        workers: int = 2,
        resume: FakeResume | None = None,
        **settings: Any,
    ) -> None:
        self.now_s = 0.0
        self.ps = [FakePs(number) for number in range(ps)]
        self.commands: list[Order] = []
        self.said: list[Say] = []
        self.told: list[str] = []
        self.journal: list[JournalLine] = []
        self.log: list[str] = []
        """Names of records and orders, in order."""
        self.saves: list[Save] = []
        self.bests: list[int] = []
        self.disk_full = False
        self.lost_disk = False
        self.led: set[str] = set()
        """Servers that get commands."""
        self.hold_commands = False
        self.held: list[Command] = []
        self.hold_saves = False
        self.held_saves: list[Save] = []
        self.held_finds: list[Find] = []
        self.finished: set[str] = set()
        self.suspects: dict[str, tuple[str, ...]] = {}
        """Servers that each task reports as unreachable, by task."""
        self.finish: Finish | None = None
        self.lives: dict[str, int] = {}
        self._stable = 0
        self.program = Program(
            ChiefSettings(
                term=3,
                chief_uuid="u",
                chief_address="chief:1",
                ps=tuple(f"host{number}:1" for number in range(ps)),
                workers=workers,
                timeouts=Timeouts(total_s=T, join_s=JOIN),
                **settings,
            ),
            self.now_s,
            job=job,
            resume=resume,
        )
        self.settle()

    # Carrying out the program's actions

    def settle(self) -> None:
        while actions := self.program.take():
            for action in actions:
                self.act(action)

    def act(self, action: Action) -> None:
        match action:
            case Say():
                self.said.append(action)
            case Tell():
                self.told.append(action.sentence)
            case JournalLine():
                self.journal.append(action)
                self.log.append(f"record {action.kind}")
            case Answer():
                action.ticket.append(action.value)
            case Save():
                self._save(action)
            case MarkBest():
                self.bests.append(action.step)
            case Finish():
                assert self.finish is None, "a job ends once"
                self.finish = action
            case Find():
                self.find(action)
            case Command():
                self.log.append(type(action.order).__name__)
                if self.hold_commands:
                    self.held.append(action)
                else:
                    self.carry_out(action)

    def release_commands(self) -> None:
        self.hold_commands = False
        held, self.held = self.held, []
        for command in held:
            self.carry_out(command)
        self.settle()

    def release_saves(self) -> None:
        self.hold_saves = False
        held, self.held_saves = self.held_saves, []
        for save in held:
            self._save(save)
        finds, self.held_finds = self.held_finds, []
        for find in finds:
            self.find(find)
        self.settle()

    def find(self, find: Find) -> None:
        if self.held_saves:
            # One thread does both.
            self.held_finds.append(find)
            return
        if self.lost_disk:
            self.program.found(Found(error="no checkpoint can be read"), self.now_s)
            return
        step = self.saves[-1].step if self.saves else None
        if step is None and self.program.state.saves.resume is not None:
            step = self.program.state.saves.resume.step
        for ps in self.ps:
            ps.restored = step or 0
        resume = (
            None
            if step is None
            else FakeResume(step=step, versions=(step,) * len(self.ps), sequences=(self.sequences,) * len(self.ps))
        )
        self.program.found(Found(resume=resume), self.now_s)

    def carry_out(self, command: Command) -> None:
        self.commands.append(command.order)
        if isinstance(command.order, Lead):
            self.led = set(command.order.addresses)
        values, errors = {}, {}
        for ps in (ps for ps in self.ps if ps.task in self.led):
            try:
                values[ps.task] = ps.obey(command.order)
            except ShardlineError as error:
                errors[ps.task] = error
        self.program.done(command.number, CommandResult(values=values, errors=errors), self.now_s)

    def _save(self, save: Save) -> None:
        assert all(ps.cuts[save.step].complete for ps in self.ps if ps.shards), "a cut was fetched that is not whole"
        if self.hold_saves:
            self.held_saves.append(save)
            return
        if self.disk_full:
            self.program.saved(Saved(step=save.step, error="No space left on device"), self.now_s)
            return
        self.saves.append(save)
        self.program.saved(Saved(step=save.step, path=f"/out/step-{save.step}", seconds=0.1, nbytes=10), self.now_s)

    # Events

    def ask(self, role: str, index: int | None = 0, **fields: Any) -> list[JoinAnswer]:
        self._stable += 1
        answers: list[JoinAnswer] = []
        own = {"stable_id": f"s{self._stable}", "address": "h:1"}
        join = Join(role=role, index=index, **{**own, **fields})
        self.program.join(answers, join, self.now_s)
        self.settle()
        if answers and answers[0].accepted:
            self.lives[answers[0].task] = answers[0].incarnation
        return answers

    def join(self, role: str, index: int = 0, **fields: Any) -> JoinAnswer:
        (answer,) = self.ask(role, index, **fields)
        assert answer.accepted, answer.reason
        return answer

    def beat(self, task: str, **fields: Any) -> bool:
        ps = next((p.status() for p in self.ps if p.task == task), None)
        # Once reported, these are in every heartbeat until taken back.
        fields.setdefault("suspects", self.suspects.get(task, ()))
        fields.setdefault("finished", task in self.finished)
        (self.finished.add if fields["finished"] else self.finished.discard)(task)
        alive = self.program.beat(Beat(task=task, incarnation=self.lives[task], ps=ps, **fields), self.now_s)
        self.settle()
        return alive

    def tick(self, seconds: float = 0.1, *, silent: tuple[str, ...] = ()) -> None:
        """Let time pass; every task that is not silent (or a dead ps) sends two heartbeats or so per suspect time."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 2.0)
            for task in list(self.lives):
                dead = any(ps.dead for ps in self.ps if ps.task == task)
                if task not in silent and not dead and self.program.state.tasks.members.current(task, self.lives[task]):
                    self.beat(task)
            self.program.tick(self.now_s)
            self.settle()

    def orders(self, task: str) -> Orders:
        return self.program.orders(task, self.lives[task])

    def kill_ps(self, number: int) -> None:
        """Its process dies, which breaks its stream."""
        self.ps[number].dead = True
        task = f"ps/{number}"
        self.program.stream_broken(task, self.lives[task], self.now_s)
        self.settle()

    def restart_ps(self, number: int) -> None:
        """A new, empty process takes its index."""
        self.ps[number] = FakePs(number, restored=self.ps[number].restored)
        self.join("ps", number)

    def initialize(self) -> None:
        """The chosen worker sets the first values."""
        assert any(self.orders(task).init for task in self.lives)
        for ps in self.ps:
            ps.initialized = True
        self.tick()
        self.tick()

    def start(self, workers: int = 2) -> None:
        """All tasks join and training begins."""
        for ps in self.ps:
            self.join("ps", ps.number)
        for index in range(workers):
            self.join("worker", index)
        if self.program.state.saves.resume is None:
            self.initialize()
        else:
            self.tick()

    def advance(self, step: int) -> None:
        for ps in self.ps:
            ps.advance(step)
        self.tick()
        self.tick()

    def text(self) -> str:
        return "\n".join(say.sentence for say in self.said)

    def kinds(self, kind: type) -> list[Any]:
        return [order for order in self.commands if isinstance(order, kind)]


def other(job: JobSpec, **changes: Any) -> JobSpec:
    return dataclasses.replace(job, **changes)


def running(**fields: object) -> Cluster:
    """A cluster whose job is running."""
    cluster = Cluster(job=make_job(**fields))
    cluster.start()
    assert cluster.program.state.phase is Phase.RUNNING
    return cluster


def phase(cluster: Cluster) -> Phase:
    return cluster.program.state.phase
