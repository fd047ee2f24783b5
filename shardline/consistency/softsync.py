"""n-softsync: the mean of several pushes is one update, and nobody waits. PROTOCOL 1.5.

Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from shardline.consistency.base import OWN, Clock, Consistency, Gives
from shardline.consistency.intake import ANSWERED, LEASED, BatchChoice, Intake
from shardline.consistency.numbered_pushes import NumberedPushes, Totals
from shardline.consistency.server import NumberedPush, ServerHalf, Terms
from shardline.core.contributions import Partial, mean, merge, none_present, scaled
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import AppliedPush, Record
from shardline.core.spec import TensorKind
from shardline.errors import JobError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Storage


@dataclass(frozen=True)
class SoftSync(Consistency):
    """Soft-synchronous: the mean of workers / n gradients is one update; no worker waits for another.

    n: updates per round of all workers. n = 1 sums one gradient per worker; n = the number of workers is `async`.
    """

    name: ClassVar[str] = "softsync"
    clock: ClassVar[Clock] = Clock.VERSION
    batches: ClassVar[BatchChoice] = LEASED
    intake: ClassVar[Intake] = ANSWERED
    gives: ClassVar[frozenset[Gives]] = OWN | {Gives.WEIGHED_SUMS}
    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise JobError(f"consistency softsync: n is {self.n}; it must be at least 1")

    def held(self, nbytes: int, replicas: int) -> dict[str, int]:
        return {"sums": nbytes}

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return SoftSyncPushes(storage, terms, self.n)


class SoftSyncPushes(NumberedPushes):
    """Sums pushes; the one that completes the sum applies its mean.

    Only the primary decides which push that is: its outcome is APPLIED, that of the others COUNTED. The standby follows
    the outcomes in the records.
    """

    def __init__(self, storage: Storage, terms: Terms, n: int) -> None:
        super().__init__(storage, terms)
        self._n = n
        self._members = 0
        """Number of admitted workers; 0 = not known."""
        self._summed = 0
        """Number of pushes in the open sum. Guarded by `order`, as is the sum."""
        self._sums: dict[int, Partial] = {}
        """The open sum, by bucket."""

    def decide(self, push: NumberedPush, last: AppliedPush, *, skip: bool) -> Decision:
        """See NumberedPushes. COUNTED if the sum lacks more pushes."""
        decision = super().decide(push, last, skip=skip)
        workers = self._members or len(self.pushes.keys() | {push.task})
        if decision.outcome is Outcome.APPLIED and self._summed + 1 < max(1, workers // self._n):
            return replace(decision, outcome=Outcome.COUNTED)
        return decision

    def take(self, totals: Totals, context: PushContext, *, outcome: Outcome, scale: float, record: int | None) -> None:
        """Add a push, and apply the mean if it completes the sum."""
        if outcome is Outcome.APPLIED and not self._summed:
            # Nothing to add up: as in asynchronous mode, to the bit.
            for bucket, total in totals:
                self.storage.apply_now(bucket, total, scale=scale, context=context, record=record)
            return
        self._summed += 1
        for bucket, total in totals:
            self._add(bucket, total, scale * (self.terms.weights(context.staleness) if self.terms.weights else 1.0))
        if outcome is Outcome.APPLIED:
            self._apply(record)

    def _add(self, bucket: Bucket, total: Partial, scale: float) -> None:
        kept = self._sums.pop(bucket.number, Partial(None, ()))
        self.storage.hold(-kept.held_bytes)
        if bucket.spec.kind is TensorKind.BUFFER:
            # Of buffers, such as batch norm's statistics, the newest values count.
            total = _own(total) if total.values is not None else kept
        else:
            total = merge(kept, _own(scaled(total, scale)), bucket.spec)
        self.storage.hold(total.held_bytes)
        self._sums[bucket.number] = total

    def _apply(self, record: int | None) -> None:
        """Apply the mean of the open sum. Call with `order` held."""
        summed, sums = self._summed, self._sums
        self._summed, self._sums = 0, {}
        for number, total in sums.items():
            bucket = self.storage.buckets[number]
            self.storage.hold(-total.held_bytes)
            if bucket.spec.kind is not TensorKind.BUFFER:
                total = mean(total, summed)
            self.storage.apply_now(bucket, total, scale=1.0, context=TOGETHER, record=record)

    # Timelines

    def members_changed(self, tasks: Collection[str], *, forget: bool = False) -> None:
        """See ServerHalf. An open sum stays open: the next push applies it if it is complete now."""
        self._members = len(tasks)
        super().members_changed(tasks, forget=forget)

    def abandon(self) -> None:
        with self.storage.order:
            self.storage.hold(-sum(total.held_bytes for total in self._sums.values()))
            self._summed, self._sums = 0, {}

    # Copies

    def settle(self) -> dict[str, WorkerSequence]:
        """See ServerHalf: apply the mean of the pushes so far. A standby does the same at this record."""
        if self._summed:
            nothing = [(bucket, Partial(None, none_present(bucket.spec))) for bucket in self.storage.buckets]
            self._apply(self.storage.record(nothing))
        return super().settle()

    def replay(self, record: Record, *, whole: bool) -> None:
        if record.push is not None:
            super().replay(record, whole=whole)
            return
        with self.storage.order:
            self.recorded(record)
            self._apply(None)


def _own(total: Partial) -> Partial:
    """The same in its own memory: memory lent for one push can't be kept."""
    if total.values is None or not total.borrowed:
        return total
    return replace(total, values=total.values.clone(), borrowed=False)
