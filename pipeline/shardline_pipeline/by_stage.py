"""Replicas of a pipeline that don't wait for each other: each contribution to a bucket is an update. PROTOCOL 1.5.

A stage is computed by other workers than the next one, so no push has all buckets of a shard: contributions are counted
by bucket and replica instead of being numbered by worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import Clock, Consistency, Gives
from shardline.consistency.cuts import AT_ONE_STEP, Cuts
from shardline.consistency.replica_steps import ReplicaSteps
from shardline.consistency.server import ServerHalf, StepWanted, Terms
from shardline.consistency.worker import SharedSteps, WorkerHalf
from shardline.core.image import WorkerSequence, origin, replica_of
from shardline.core.outcome import Decision, Outcome
from shardline.core.push_context import PushContext
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Storage
from shardline.update.base import Need
from shardline.waist import Standing


class StageSteps(SharedSteps):
    """A contribution belongs to (step, replica, bucket), and is computed from the latest parameters of its stage.

    `step` counts the worker's own steps, which are those of all its replicas.
    """

    presums: ClassVar[bool] = False

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job, steps_with_all=False)
        self._timeline = 0
        self.ahead: int = 1
        self._updates = self._counted = 0

    @property
    def job_step(self) -> int:
        """The fewest updates that the stages of this worker have had, as far as it knows: its own, or more.

        Its own, while other stages may need again what this worker has computed before the timeline began.
        """
        return max(self.step, self._updates) if self.step >= self._counted else self.step

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        """See WorkerHalf.located.

        In a new timeline those begin together that are bound to each other by workers which have stages of several: at
        the first step that some stage of one of them lacks. Later the worker goes on with what it has not closed.
        """
        timeline = max(standing.timeline for standing in standings.values())
        if timeline != self._timeline:
            self.ahead = 1 + min(one.replicas[replica] for one in standings.values() for replica in owned)
            self._counted = max(one.last_seq for one in standings.values())
            # The job may have gone back behind what it had.
            self._updates = 0
        self._timeline = timeline
        self.step = self.ahead - 1
        return set(owned)

    @property
    def exact(self) -> int | None:
        return None

    @property
    def target(self) -> int | None:
        return None

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return [Block(replica, 1) for replica in sorted(owned)]

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        self.ahead = step + 1
        self._updates = min(base[shard] for shard in shards)
        return super().closed(step, shards, base, dropped=dropped)


def admit_update(step: int, block: Block, *, counted: int, bucket_step: int, stop_step: int | None) -> Decision:
    """Whether a replica's contribution to a bucket is its next update. Pure.

    counted: the first step that the bucket has not counted of this replica; a later one counts as well. stop_step: the
    bucket's last; None = not known.
    """
    if block.count != 1:
        return Decision(Outcome.REFUSED, f"replicas {block} are added up, but each of them makes an update")
    if step < counted:
        return Decision(Outcome.DUPLICATE, f"step {step} of replica {block.first} was already counted")
    if stop_step is not None and bucket_step >= stop_step:
        # Not STOPPED: other buckets may still need what this worker has computed, so it goes on until it is told.
        return Decision(Outcome.LATE_DROPPED, f"the job stops at version {stop_step}, and the bucket has that")
    return Decision(Outcome.COUNTED)


@dataclass(frozen=True)
class ByStage(Consistency):
    """Asynchronous in a pipeline: each replica's gradient of a stage is an update when it comes.

    slack: steps that a replica may be ahead of the slowest one of its stage before it waits; -1 = any number.
    """

    clock: ClassVar[Clock] = Clock.VERSION
    cuts: ClassVar[Cuts] = AT_ONE_STEP
    gives: ClassVar[frozenset[Gives]] = frozenset({Gives.ONE_STEP_CUTS, Gives.EVERY_GRADIENT, Gives.PARTS})
    tells: ClassVar[frozenset[Need]] = frozenset(Need)
    name: ClassVar[str] = "async"
    slack: int = -1

    def needed(self, replicas: int) -> int:
        return 1

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return StageSteps(job)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return StageUpdates(storage, terms, self.slack)


@dataclass(frozen=True)
class PacedByStage(ByStage):
    """Stale synchronous parallel in a pipeline: no replica gets more than `slack` steps ahead in any stage."""

    name: ClassVar[str] = "ssp"


class StageUpdates(ReplicaSteps):
    """Each contribution to a bucket is applied as it comes; a replica's steps count once each, in order.

    slack: see ByStage.
    """

    def __init__(self, storage: Storage, terms: Terms, slack: int) -> None:
        super().__init__(storage, terms)
        self._slack = slack
        self._begun: list[int] = []
        """By replica: the first step that some bucket had not counted when the timeline began."""
        self._furthest = 0
        """The most steps that any bucket had counted of a replica then."""
        self._begin(0)

    def decide(self, bucket: Bucket, step: int, block: Block) -> Decision:
        """See ReplicaSteps. What is dropped because the job stops is used up as well."""
        if block.first >= self.terms.contributors:
            return Decision(Outcome.REFUSED, f"block {block} is outside the job's {self.terms.contributors} replicas")
        found = admit_update(
            step, block, counted=bucket.counted[block.first], bucket_step=bucket.step, stop_step=self.storage.stop_step
        )
        if found.outcome is Outcome.COUNTED:
            bucket.counted[block.first] = step
        elif found.outcome is Outcome.LATE_DROPPED:
            bucket.counted[block.first] = step + 1
        return found

    def ready(self, bucket: Bucket) -> bool:
        return True

    @property
    def divisor(self) -> int:
        return 1

    def complete(self, bucket: Bucket) -> None:
        (replica,) = bucket.contributions.counted
        try:
            # Before the update, which may copy the bucket for a cut.
            bucket.counted[replica] += 1
            total = bucket.contributions.take_of([replica])
            self.storage.apply_bucket(bucket, total, _context(replica, bucket.counted[replica]))
        except Exception:
            # Nothing was published: it can be sent again.
            bucket.counted[replica] -= 1
            bucket.contributions.clear()
            bucket.hyper = None
            raise

    def noted(self, bucket: Bucket, step: int, *, ready: bool) -> None:
        self.storage.observers.on_publish(bucket.number)

    # Queries

    def serve(self, bucket: Bucket, want: StepWanted) -> Outcome:
        """See ServerHalf. Values of earlier versions are not kept."""
        if want.step is None:
            return Outcome.SERVED
        if want.at_least:
            return Outcome.WAITING if self._is_ahead(bucket, want.step) else Outcome.SERVED
        if want.step > bucket.step:
            return Outcome.WAITING
        return Outcome.SERVED if want.step == bucket.step else Outcome.OVERTAKEN

    def _is_ahead(self, bucket: Bucket, step: int) -> bool:
        """Whether who has done so many steps has to wait for other replicas. At the bucket's end nobody does."""
        stop = self.storage.stop_step
        open_ = stop is None or bucket.step < stop
        return open_ and self._slack >= 0 and step - min(bucket.counted) > self._slack

    def progress(self, replica: int) -> int:
        """The step that a replica begins the timeline with.

        Whoever asks late gets the same as all others, which may have gone on meanwhile.
        """
        return self._begun[replica]

    def last_push(self, task: str, incarnation: int = 0) -> int:
        """See ServerHalf: the most steps that any bucket had counted of any replica when the timeline began."""
        return self._furthest

    def waiting_for(self) -> list[int]:
        found: set[int] = set()
        for bucket in self.storage.buckets if self._slack >= 0 else ():
            least = min(bucket.counted)
            if self._is_ahead(bucket, max(bucket.counted)):
                found.update(replica for replica, steps in enumerate(bucket.counted) if steps == least)
        return sorted(found)

    # Timelines

    def members_changed(self, tasks: Collection[str], *, forget: bool = False) -> None:
        """See ServerHalf. A timeline begins without members. A replica goes on whichever worker has it."""
        if not tasks:
            self._note_begin()
        super().members_changed(self._origins, forget=forget)

    @property
    def _origins(self) -> list[str]:
        return [origin(replica) for replica in range(self.terms.contributors)]

    def abandon(self) -> None:
        self._begin(0)

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """See ServerHalf. All replicas begin at the step of the one that was furthest, so that none repeats a batch.

        A checkpoint of another plan does not say how far they were: no replica has done more steps than there were
        updates.
        """
        versions = [bucket.step for bucket in self.storage.buckets]
        own = self._origins
        steps = [one.last_seq for task, one in sequences.items() if task in own]
        self._begin(max(steps, default=max(versions, default=0)))

    def _begin(self, step: int) -> None:
        for bucket in self.storage.buckets:
            with bucket.lock:
                bucket.counted[:] = [step] * self.terms.contributors
        self._note_begin()

    def _note_begin(self) -> None:
        counted = [tuple(bucket.counted) for bucket in self.storage.buckets]
        self._begun = [min(steps) for steps in zip(*counted, strict=True)]
        self._furthest = max(map(max, counted))

    # Standby

    def remembered(self) -> tuple[Sequence[AppliedPush], Applied | None]:
        """See ServerHalf: each bucket's counts, with its number as the incarnation."""
        found = []
        for bucket in self.storage.buckets:
            with bucket.lock:
                found += [
                    AppliedPush(
                        task=origin(replica), incarnation=bucket.number, last_seq=steps, outcome=Outcome.APPLIED
                    )
                    for replica, steps in enumerate(bucket.counted)
                ]
        return found, None

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        for push in pushes:
            bucket = self.storage.buckets[push.incarnation]
            replica = replica_of(push.task)
            with bucket.lock:
                bucket.counted[replica] = max(bucket.counted[replica], push.last_seq)

    def replay(self, record: Record, *, whole: bool) -> None:
        assert record.push is not None
        replica, steps = replica_of(record.push.task), record.push.last_seq
        for part in record.parts:
            bucket = self.storage.buckets[part.bucket]
            total = self.total_of(part.tensor(), part.present, bucket)
            with bucket.lock:
                bucket.hyper = part.hyper
                bucket.apply(total, context=_context(replica, steps))
                bucket.counted[replica] = steps


def _context(replica: int, steps: int) -> PushContext:
    return PushContext(task=origin(replica), clock=steps)
