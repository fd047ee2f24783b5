"""Voted synchronous steps: a complete step waits for the lead's decision for all shards. PROTOCOL 1.4."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.choosing import StepChoices
from shardline.consistency.replica_steps import ReplicaSteps
from shardline.consistency.server import ServerHalf, ShardVote, Staged, Terms
from shardline.core.contributions import Partial, mean
from shardline.core.gradients import norm_parts
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Outcome
from shardline.core.records import Applied, AppliedPush, Record
from shardline.core.reduce import Block
from shardline.core.spec import TensorKind
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Hyper, Storage


class VotedSteps(ReplicaSteps):
    """Contributions are staged; the shard votes on its mean gradient and applies the verdict in all buckets."""

    outcome: ClassVar[Outcome] = Outcome.STAGED
    choices: StepChoices | None = None
    """Whose gradients make each step, if a step closes before all replicas have contributed."""
    last_verdict: Applied | None = None
    """The last known verdict; its step may not be published yet."""

    def __init__(self, storage: Storage, terms: Terms) -> None:
        super().__init__(storage, terms)
        self._nonfinite: dict[int, set[str]] = {}
        """Tensors that workers reported as not finite, by step."""
        self._completed: set[int] = set()
        self._staged: Staged | None = None
        """Gradients of the open vote."""
        self._epoch = 0
        """Counts restores, so that a verdict of before changes nothing."""

    # Until the step is complete

    def counted(self, bucket: Bucket, block: Block, nonfinite: Collection[str], hyper: Hyper | None) -> None:
        """Record names for the vote, before the step can be seen complete, so that the vote never misses them."""
        super().counted(bucket, block, nonfinite, hyper)
        if nonfinite:
            with self.storage.lock:
                self._nonfinite.setdefault(bucket.step, set()).update(nonfinite)

    def complete(self, bucket: Bucket) -> None:
        """Does nothing: the step waits for the other buckets."""

    def noted(self, bucket: Bucket, step: int, *, ready: bool) -> None:
        if not ready:
            return
        for other in self.storage.buckets:
            with other.lock:
                if other.step != step or not self.ready(other):
                    return
        with self.storage.lock:
            if step in self._completed:
                return
            self._completed.add(step)
        self.storage.observers.on_complete(step)

    # The vote

    def vote(self, step: int) -> tuple[ShardVote, Staged] | None:
        """The mean gradient of a complete step with its sums of squares. Its replicas stay counted until the verdict.

        None where the contributions were dropped since the step was complete (a restore).
        """
        with self.storage.lock:
            nonfinite = self.take_names(step)
            epoch = self._epoch
        sums: list[tuple[int, float]] = []
        totals: list[Partial] = []
        for bucket in self.storage.buckets:
            with bucket.lock:
                if bucket.step != step or not self.ready(bucket):
                    self.storage.hold(-sum(total.held_bytes for total in totals))
                    return None
                total = self.take_sum(bucket)
            if bucket.spec.kind in (TensorKind.PARAM, TensorKind.TABLE):
                total = mean(total, self.divisor)
            if bucket.spec.kind is TensorKind.PARAM:
                found, names = norm_parts(self.terms.plan, bucket.spec, total)
                sums += found
                nonfinite |= names
            self.storage.hold(total.held_bytes)
            totals.append(total)
        vote = ShardVote(step=step, sums=tuple(sums), nonfinite=tuple(sorted(nonfinite)))
        staged = Staged(step, epoch, totals)
        with self.storage.lock:
            self._staged = staged
        if epoch != self._epoch:
            # Dropped while the vote was being made.
            self._forget_staged()
            return None
        return vote, staged

    def take_names(self, step: int) -> set[str]:
        """Tensors that workers reported as not finite. Call with the storage's lock held."""
        return self._nonfinite.pop(step, set())

    def take_sum(self, bucket: Bucket) -> Partial:
        """The sum of a bucket's open step. Call with its lock held."""
        return bucket.contributions.take()

    def waits_for(self, staged: Staged) -> bool:
        """Whether this vote is still open."""
        return self._staged is staged

    def decided(self, staged: Staged, verdict: Applied) -> None:
        """Store the verdict of an open vote, so that a new lead can learn it."""
        with self.storage.lock:
            # Not if the shard went back meanwhile: then other steps follow.
            if self.waits_for(staged):
                self.last_verdict = verdict

    def apply_verdict(self, staged: Staged, *, scale: float, skip: bool) -> None:
        """Apply or skip a step in every bucket; does nothing if the shard was restored since the vote."""
        self.apply(staged, Applied(step=staged.step, scale=scale, skip=skip))

    def apply(self, staged: Staged, verdict: Applied) -> None:
        """Apply a verdict in every bucket that still waits for it."""
        self.storage.apply_together(_StagedUpdate(self, staged, verdict))

    def open_for(self, bucket: Bucket, staged: Staged) -> bool:
        """Whether the bucket waits for this verdict: it was not restored since the vote. Call with its lock held."""
        return bucket.step == staged.step and staged.epoch == self._epoch

    def let_go(self, staged: Staged, bucket: int) -> None:
        """Free a total that was applied, or never will be. Call with the bucket's lock held."""
        self.storage.hold(-staged.totals[bucket].held_bytes)
        staged.totals[bucket] = Partial(None, ())

    def close(self, staged: Staged, verdict: Applied) -> None:
        """Close a step that every bucket has published; does nothing after a restore. Call with `order` held."""
        self.storage.observers.on_counted()
        with self.storage.lock:
            if staged.epoch != self._epoch:
                return
            if self._staged is staged:
                # Otherwise the next step is already voted on, and its verdict may be known.
                self._staged, self.last_verdict = None, verdict
            self._completed.discard(staged.step)
            self.storage.tally.skipped_steps += verdict.skip

    # Standbys and timelines

    def remembered(self) -> tuple[Sequence[AppliedPush], Applied | None]:
        return (), self.last_verdict

    def recall(self, pushes: Sequence[AppliedPush], verdict: Applied | None) -> None:
        self.last_verdict = verdict

    def replay(self, record: Record, *, whole: bool) -> None:
        super().replay(record, whole=whole)
        if record.verdict is not None:
            self.last_verdict = record.verdict

    def abandon(self) -> None:
        self._epoch += 1
        self._forget_staged()

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """See ServerHalf. The steps that follow will get their own verdicts."""
        self.last_verdict = None
        with self.storage.lock:
            self._nonfinite.clear()
            self._completed.clear()

    def _forget_staged(self) -> None:
        """Free the gradients of a vote; other references to it find nothing in it."""
        with self.storage.lock:
            staged, self._staged = self._staged, None
        if staged is None:
            return
        for bucket in self.storage.buckets:
            with bucket.lock:
                self.let_go(staged, bucket.number)


@dataclass(frozen=True)
class _StagedUpdate:
    """A verdict being applied to all buckets."""

    steps: VotedSteps
    staged: Staged
    verdict: Applied

    def total_of(self, bucket: Bucket) -> Partial | None:
        return self.staged.totals[bucket.number] if self.steps.open_for(bucket, self.staged) else None

    def applied(self, bucket: Bucket) -> None:
        self.steps.let_go(self.staged, bucket.number)

    def closed(self) -> None:
        self.steps.close(self.staged, self.verdict)


def votes(mode: ServerHalf) -> VotedSteps | None:
    """A mode whose complete steps wait for a verdict; None if this one applies them itself."""
    return mode if isinstance(mode, VotedSteps) else None


def choices(mode: ServerHalf) -> StepChoices | None:
    """Whose gradients make each step; None if all replicas' do."""
    return mode.choices if isinstance(mode, VotedSteps) else None
