"""Synchronous steps that the first replicas close, at the lead's choice; the gradients of the rest are dropped.

Chen, Pan, Monga, Bengio, Jozefowicz: Revisiting Distributed Synchronous SGD, 2016. PROTOCOL 1.4.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardline.consistency.choosing import StepChoices
from shardline.consistency.replica_steps import progress
from shardline.consistency.server import ShardVote, Staged, Terms
from shardline.consistency.voted import VotedSteps
from shardline.consistency.worker import SharedSteps
from shardline.core.choices import choice_of, members
from shardline.core.contributions import Partial
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
from shardline.core.spec import TensorKind
from shardline.errors import JobError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Hyper, Storage


class SpareContributions(SharedSteps):
    """Replicas are not summed before they are sent, since the lead chooses among them."""

    presums: ClassVar[bool] = False

    def brings_buffers(self, replica: int) -> bool:
        """See WorkerHalf.brings_buffers: the lowest replica of the choice brings them, whichever that will be."""
        return True

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return [Block(replica, 1) for replica in sorted(owned)]


def check_spares(spares: int, quorum: float) -> None:
    """Raise JobError unless these settings make sense for some number of replicas."""
    if spares < 0:
        raise JobError(f"consistency sync: spares is {spares}; give a whole number >= 0")
    if not 0.0 < quorum <= 1.0:
        raise JobError(f"consistency sync: quorum is {quorum}; give a fraction above 0 and at most 1")
    if spares and quorum < 1.0:
        raise JobError(
            f"consistency sync: spares={spares} and quorum={quorum} both say how many replicas a step waits for; give "
            "one of them"
        )


def needed(replicas: int, spares: int, quorum: float) -> int:
    """Number of gradients that close a step. Raises JobError if there would be none."""
    if spares >= replicas:
        raise JobError(
            f"consistency sync: spares is {spares}, and the job has {replicas} replicas, so no step would need a "
            "gradient; use fewer spares or more replicas"
        )
    # A product such as 0.7 * 10 is slightly more than 7.
    return min(replicas - spares, max(1, math.ceil(quorum * replicas - 1e-9)))


def admit_spare(counts: Decision, step: int, replica: int, *, bucket_step: int, choice: int | None) -> Decision:
    """Whether a contribution of one replica counts. Pure.

    counts: the decision by admit_push(), which knows no choice. choice: that of `step`; None if not known.
    """
    if counts.outcome not in (Outcome.COUNTED, Outcome.DUPLICATE):
        return counts
    if choice is None:
        if step >= bucket_step:
            return counts
    elif choice >> replica & 1:
        return counts
    return Decision(Outcome.LATE_DROPPED, f"step {step} is made without replica {replica}, which came too late")


def progress_of_spare(bucket_step: int, replica: int, *, counted: bool, choice: int | None) -> int:
    """The step that a replica has to work on according to one bucket. choice: that of its open step. Pure."""
    dropped = choice is not None and not choice >> replica & 1
    return progress(bucket_step, counted or dropped)


@dataclass
class _OpenStep:
    """What has arrived of one step. Guarded by the storage's lock."""

    buckets: Counter[int] = field(default_factory=Counter)
    """Number of buckets that have counted a replica."""
    arrived: list[int] = field(default_factory=list)
    """Replicas that every bucket has counted, in this order."""
    nonfinite: dict[int, set[str]] = field(default_factory=dict)
    """Tensors reported as not finite, by replica."""
    hyper: dict[int, Hyper] = field(default_factory=dict)
    asked: bool = False
    """There are enough, and the lead is to be asked whose gradients count."""
    complete: bool = False
    """Those of the choice are here."""
    voted: bool = False
    """The shard has voted on it."""


class SpareSteps(VotedSteps):
    """Contributions are kept one by one until the choice is known. Then the shard votes on the sum over it.

    The lead chooses the replicas that it has whole first; other shards ask it as soon as they have enough.
    """

    one_brings_buffers: ClassVar[bool] = False

    def __init__(self, storage: Storage, terms: Terms, count: int) -> None:
        super().__init__(storage, terms)
        self._count = count
        self._open: dict[int, _OpenStep] = {}
        self.choices = self.known = StepChoices(storage.number, storage.lock, terms.replayed, on_change=self._look)

    @property
    def divisor(self) -> int:
        return self._count

    # Contributions

    def decide(self, bucket: Bucket, step: int, block: Block) -> Decision:
        if block.count != 1:
            return Decision(Outcome.REFUSED, f"replicas {block} were pushed as one; with spares each is pushed alone")
        counts = super().decide(bucket, step, block)
        return admit_spare(counts, step, block.first, bucket_step=bucket.step, choice=self.known.of(step))

    def ready(self, bucket: Bucket) -> bool:
        choice = self.known.of(bucket.step)
        return choice is not None and not choice & ~bucket.contributions.mask

    def counted(self, bucket: Bucket, block: Block, nonfinite: Collection[str], hyper: Hyper | None) -> None:
        """See ReplicaSteps: note what the vote needs of this replica, should it be chosen."""
        replica = block.first
        with self.storage.lock:
            step = self._open.setdefault(bucket.step, _OpenStep())
            step.buckets[replica] += 1
            step.nonfinite.setdefault(replica, set()).update(nonfinite)
            step.hyper[replica] = hyper or {}
            if step.buckets[replica] == len(self.storage.buckets):
                step.arrived.append(replica)

    def noted(self, bucket: Bucket, step: int, *, ready: bool) -> None:
        """See _look(), which reports a complete step."""
        self._look(step)

    def _look(self, step: int | None) -> None:
        """Choose if possible, and report once each that the choice is wanted, and that all of it is here.

        None: of every open step.
        """
        with self.storage.lock:
            due = [number for number in (self._open if step is None else (step,)) if self._is_due(number)]
        for number in due:
            self.storage.observers.on_complete(number)

    def _is_due(self, step: int) -> bool:
        found = self._open.get(step)
        if found is None or found.complete:
            return False
        choice = self.known.made_held(step, found.arrived, self._count)
        if choice is None:
            found.asked, before = len(found.arrived) >= self._count, found.asked
            return found.asked and not before
        found.complete = not choice & ~choice_of(found.arrived)
        return found.complete

    # The vote

    def vote(self, step: int) -> tuple[ShardVote, Staged] | None:
        """See ServerHalf. Once: the choice may become known between the report that it is wanted and this call."""
        with self.storage.lock:
            found = self._open.get(step)
            if found is None or not found.complete or found.voted:
                return None
            found.voted = True
        return super().vote(step)

    def take_names(self, step: int) -> set[str]:
        """See VotedSteps: those of the chosen replicas."""
        found = self._open.get(step)
        chosen = members(self.known.of(step) or 0)
        return set().union(*(found.nonfinite.get(replica, set()) for replica in chosen)) if found else set()

    def take_sum(self, bucket: Bucket) -> Partial:
        """See VotedSteps. Buffers and hyper-parameters are those of the lowest replica of the choice."""
        chosen = members(self.known.of(bucket.step) or 0)
        bucket.hyper = self._open[bucket.step].hyper[chosen[0]].get(bucket.group)
        return bucket.contributions.take_of(chosen[:1] if bucket.spec.kind is TensorKind.BUFFER else chosen)

    def decided(self, staged: Staged, verdict: Applied) -> None:
        super().decided(staged, self._with_choice(verdict))

    def apply_verdict(self, staged: Staged, *, scale: float, skip: bool) -> None:
        self.apply(staged, self._with_choice(Applied(step=staged.step, scale=scale, skip=skip)))

    def _with_choice(self, verdict: Applied) -> Applied:
        return replace(verdict, choice=self.known.of(verdict.step) or 0)

    def close(self, staged: Staged, verdict: Applied) -> None:
        super().close(staged, verdict)
        with self.storage.lock:
            if staged.epoch == self._epoch:
                self._closed(verdict)

    def _closed(self, verdict: Applied) -> None:
        """A step is published. Call with the storage's lock held."""
        self.known.closed_held(verdict.step, verdict.choice)
        for old in [old for old in self._open if old <= verdict.step]:
            del self._open[old]

    # Queries

    def progress(self, replica: int) -> int:
        found = []
        for bucket in self.storage.buckets:
            with bucket.lock:
                counted = replica in bucket.contributions.counted
                choice = self.known.of(bucket.step)
                found.append(progress_of_spare(bucket.step, replica, counted=counted, choice=choice))
        return min(found)

    def waiting_for(self) -> list[int]:
        """See ServerHalf: those of the choice, if it is known."""
        choice = self.known.of(min(bucket.step for bucket in self.storage.buckets))
        return [replica for replica in super().waiting_for() if choice is None or choice >> replica & 1]

    # Timelines and standbys

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """See ServerHalf. All shards go back together, and choose anew."""
        super().restored(sequences)
        with self.storage.lock:
            self._open.clear()
            self.known.begin_held(self.storage.buckets[0].step)

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        super().recall(pushes, verdict)
        with self.storage.lock:
            if verdict is not None:
                self._closed(verdict)
            self.known.copied_held(self.storage.buckets[0].step)

    def replay(self, record: Record, *, whole: bool) -> None:
        super().replay(record, whole=whole)
        if record.verdict is not None:
            with self.storage.lock:
                self._closed(record.verdict)
