"""Stale synchronous parallel: asynchronous pushes, and pulls that wait for workers too far behind. PROTOCOL 1.5.

Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from shardline.consistency.asynchronous import AsynchronousPushes
from shardline.consistency.base import OWN, Clock, Consistency, Gives, in_stages
from shardline.consistency.eager import Eager
from shardline.consistency.intake import LEASED, NUMBERED, BatchChoice, Intake
from shardline.consistency.numbered_pushes import COUNTED
from shardline.consistency.server import NumberedPush, ServerHalf, StepWanted, Terms
from shardline.consistency.worker import ComputedAt, OwnPushes, Stamp, WorkerHalf
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.records import AppliedPush
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import JobError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Storage
from shardline.update.base import Need
from shardline.waist import Standing


class PacedPushes(OwnPushes):
    """Own pushes of a worker that must not get too far ahead of others: numbered by its clock too, for all shards."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job)
        self.clock: int = 0
        self._timeline = 0

    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        """See WorkerHalf.asks_for: naming a replica says that this worker begins to compute."""
        return (0,)

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        """See WorkerHalf.located. In a new timeline all workers begin anew; in the same one, none goes back."""
        timeline = max(standing.timeline for standing in standings.values())
        if timeline != self._timeline:
            self.clock = 0
        self._timeline = timeline
        self.woken(standings)
        return super().located(standings, owned)

    def stamp(self, shard: int) -> Stamp:
        return replace(super().stamp(shard), clock=self.clock + 1)

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        self.clock += 1
        return super().closed(step, shards, base, dropped=dropped)

    def accept(self, mark: ComputedAt) -> bool:
        self.clock += 1
        return super().accept(mark)


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale synchronous parallel: asynchronous, but no worker gets more than `slack` pushes ahead of the slowest.

    slack: pushes; 0 is `sync`. in_stages: each stage of a pipeline by itself. A job with a pipeline sets it.
    """

    name: ClassVar[str] = "ssp"
    clock: ClassVar[Clock] = Clock.VERSION
    batches: ClassVar[BatchChoice] = LEASED
    intake: ClassVar[Intake] = NUMBERED
    gives: ClassVar[frozenset[Gives]] = OWN | {Gives.EQUAL_MOVES}
    tells: ClassVar[frozenset[Need]] = frozenset(Need)
    slack: int = 3
    in_stages: bool = False

    def __post_init__(self) -> None:
        if self.slack < 0:
            raise JobError(f"consistency ssp: slack is {self.slack}; it must be at least 0")

    def under(self, spec: ConsistencySpec) -> Consistency:
        """Without slack, all workers read the same values in each round: a synchronous job."""
        if not self.slack:
            return Eager().under(spec)
        return in_stages("ssp", self.slack) if self.in_stages else self

    def staged(self) -> Consistency:
        return SSP(self.slack, in_stages=True)

    def plain(self) -> Consistency:
        return SSP(self.slack)

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return PacedPushes(job)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return PacedByTheSlowest(storage, terms, Clocks(self.slack))


class Clocks:
    """How many pushes each worker has done, at one shard, and who is too far ahead. Pure.

    A worker tells its clock with each push, so that all shards count the same: otherwise two workers could each be
    ahead of the other, at different shards, and wait for ever. It counts from when it begins to compute until it rests
    or leaves: a worker without work must hold nobody back.
    """

    def __init__(self, slack: int) -> None:
        self.slack = slack
        self.of: dict[str, int] = {}
        """By worker that computes."""
        self._lives: dict[str, int] = {}
        """The incarnation whose clock it is, by worker."""
        self.members: frozenset[str] = frozenset()
        """Admitted workers; empty = not known."""
        self.held: frozenset[str] = frozenset()
        """Workers that are more than `slack` ahead of the slowest. Replaced as a whole: readable without a lock."""

    @property
    def least(self) -> int:
        """The clock of the slowest worker."""
        return min(self.of.values(), default=0)

    def slowest(self) -> list[str]:
        """The workers that others wait for, if any does."""
        return sorted(task for task, clock in self.of.items() if clock == self.least) if self.held else []

    def begin(self, task: str, incarnation: int) -> None:
        """A worker begins to compute, where the slowest is: nobody waits for what it has missed.

        One that computes already keeps its clock: it may wait for the answer to a push that is counted, and a lower
        clock would hold up the others until its next one.
        """
        if task not in self.of or self._lives[task] != incarnation:
            self._lives[task] = incarnation
            self._set({**self.of, task: self.least})

    def why_not(self, task: str, incarnation: int, clock: int) -> str:
        """Why a push can't have this clock; empty if it can. A clock only goes forward: others would wait for it."""
        known = self.of.get(task, 0) if self._lives.get(task) == incarnation else 0
        if clock > known:
            return ""
        return (
            f"the push of {task} has clock {clock}, and the shard has counted up to clock {known}; a worker's clock is "
            f"the progress that the shard reported when it began, plus its pushes since then"
        )

    def pushed(self, task: str, incarnation: int, clock: int) -> None:
        """A worker's push counts. One that was being applied when the worker's next life began says nothing of that."""
        if incarnation < self._lives.get(task, 0):
            return
        self._lives[task] = incarnation
        self._set({**self.of, task: clock})

    def rest(self, task: str) -> None:
        """A worker has nothing to push until it begins again."""
        self._set({other: clock for other, clock in self.of.items() if other != task})

    def admit(self, members: Collection[str]) -> None:
        """Only these workers are admitted from now on; none = not known, and all begin anew."""
        self.members = frozenset(members)
        self._set({task: clock for task, clock in self.of.items() if task in self.members})

    def anew(self) -> None:
        """Another history begins: so do all workers."""
        self._set({})

    def _set(self, clocks: dict[str, int]) -> None:
        # A push that was being applied when its worker was fenced must not bring it back.
        self.of = {task: clock for task, clock in clocks.items() if not self.members or task in self.members}
        least = self.least
        self.held = frozenset(task for task, clock in self.of.items() if self.waits(task, clock - least))

    def waits(self, task: str, ahead: int) -> bool:
        """Whether a worker so many pushes ahead of the slowest has to wait."""
        return ahead > self.slack


class PacedByTheSlowest(AsynchronousPushes):
    """Asynchronous pushes; the pull after one is answered once the slowest worker is near enough.

    A standby keeps no clocks. A failover is a new timeline, in which every worker begins anew.
    """

    def __init__(self, storage: Storage, terms: Terms, clocks: Clocks) -> None:
        super().__init__(storage, terms)
        self._clocks = clocks
        """Guarded by the storage's lock, but for `held`."""

    def decide(self, push: NumberedPush, last: AppliedPush, *, skip: bool) -> Decision:
        decision = super().decide(push, last, skip=skip)
        if decision.outcome not in COUNTED:
            return decision
        with self.storage.lock:
            refused = self._clocks.why_not(push.task, push.incarnation, push.clock)
        return Decision(Outcome.REFUSED, refused) if refused else decision

    def counted(self, push: NumberedPush) -> None:
        with self.storage.lock:
            self._clocks.pushed(push.task, push.incarnation, push.clock)

    def answer(self, then: Callable[[], None]) -> None:
        """See NumberedPushes. The pull may have to wait for others."""

    def standing(self, task: str, incarnation: int, replicas: Sequence[int]) -> dict[int, int]:
        """See ServerHalf. Who names replicas computes from now on; who names none rests, and holds up nobody."""
        with self.storage.lock:
            if replicas:
                self._clocks.begin(task, incarnation)
            else:
                self._clocks.rest(task)
        # Have waiting pulls check whether they still have to wait.
        for bucket in self.storage.buckets:
            self.storage.observers.on_publish(bucket.number)
        return super().standing(task, incarnation, replicas)

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        """See ServerHalf. Once the job stops, nobody waits: the others may push no more."""
        if want.step is None and want.task in self._clocks.held and self.storage.stop_step is None:
            return Outcome.WAITING
        return super().serve(bucket, want)

    def progress(self, replica: int) -> int:
        return self._clocks.least

    def late(self) -> str:
        with self.storage.lock:
            slowest = self._clocks.slowest()
        return f"pushes of {', '.join(slowest[:8])}" if slowest else super().late()

    # Timelines

    def members_changed(self, tasks: Collection[str], *, forget: bool = False) -> None:
        with self.storage.lock:
            self._clocks.admit(tasks)
        super().members_changed(tasks, forget=forget)

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """See ServerHalf. All workers begin anew, at equal clocks."""
        super().restored(sequences)
        with self.storage.lock:
            self._clocks.anew()
