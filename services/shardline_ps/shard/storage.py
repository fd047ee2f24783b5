"""The storage of one shard: its buckets, and the path of an update from computed to published.

With a standby, an update of a step is computed at once and published when the standby has it too; a push is published
at once, and its answers wait. PROTOCOL 1.4.5, 1.8.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence

from shardline import consistency
from shardline.codecs.coding import PLAIN
from shardline.consistency.server import BucketView, Hyper, Observers, ShardUpdate, Tally
from shardline.core.contributions import Contributions, Partial
from shardline.core.outcome import Outcome
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import AppliedPush, RecordPart
from shardline.core.spec import TensorKind
from shardline.storage.publication import PlainPublication, Publication, areas
from shardline.update import bucket_rule
from shardline_ps.shard.bucket import Bucket
from shardline_ps.shard.cuts import CutBook
from shardline_ps.shard.settings import ShardSettings
from shardline_ps.shard.summing import SummingBucket
from shardline_ps.standby.record_log import RecordLog


class ByteCount:
    """Bytes of sums that wait for more contributions or a verdict. Buckets refer to it rather than to their shard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        """May be read without a lock."""

    def add(self, difference: int) -> None:
        with self._lock:
            self.value += difference


class WaitingUpdate:
    """A computed update of one or more buckets that waits for the standby: by bucket, whether it changes the values."""

    def __init__(self) -> None:
        self.changed: dict[int, bool] = {}


class ShardStorage:
    """Buckets with their locks, publication, cuts and tally; see shardline.consistency.server.Storage."""

    def __init__(
        self,
        number: int,
        settings: ShardSettings,
        *,
        publication: Publication | None = None,
        observers: Observers,
    ) -> None:
        """publication: memory for the published values; None = ordinary memory on the settings' device.

        observers: replaced when a standby becomes the primary.
        """
        self.number = number
        self.observers = observers
        spec, mode = settings.plan.shards[number], consistency.of(settings.consistency)
        self.waiting = ByteCount()
        self.publication = PlainPublication(spec, settings.device) if publication is None else publication
        """Memory of the buckets' values."""
        self.buckets = [
            (SummingBucket if settings.aggregates and bucket.kind is TensorKind.PARAM else Bucket)(
                number,
                index,
                bucket,
                settings.plan.tensors,
                functools.partial(bucket_rule, settings.rule, settings.schedule, bucket, settings.plan.tensors),
                combined=(settings.coding.bucket(number, index).codec if settings.coding else PLAIN).at_server.combine,
                pub=areas(self.publication, index, bucket, keeps_previous=mode.keeps_previous),
                contributions=Contributions(
                    bucket, settings.replicas, on_held=self.waiting.add, in_tree=mode.sums_in_tree
                ),
            )
            for index, bucket in enumerate(spec.buckets)
        ]
        self._publishes_first = not mode.publishes_after_standby
        # If shards are cut one by one, the chief says when.
        self.cuts = CutBook(len(self.buckets), settings.cut_every if mode.consistent_cuts else 0)
        self.lock = threading.Lock()
        self.order = threading.Lock()
        self.tally = Tally()
        self.stop_step: int | None = None
        self.log: RecordLog | None = None
        """The records for the standby; None if there is no standby."""

    @property
    def version(self) -> int:
        return min([bucket.version for bucket in self.buckets])

    @property
    def held_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets) + self.waiting.value + self.cuts.held_bytes

    def hold(self, difference: int) -> None:
        self.waiting.add(difference)

    def check_hyper(self, bucket: BucketView, hyper: Hyper | None) -> None:
        rule = self.buckets[bucket.number].rule
        if hyper and rule is not None and (numbers := hyper.get(bucket.group)):
            rule.check_hyper(numbers)

    # Updates

    def apply_bucket(self, bucket: BucketView, total: Partial, context: PushContext = TOGETHER) -> None:
        to, made = self.buckets[bucket.number], WaitingUpdate()
        log, number = self.log, None
        if log is not None:
            release = None if self._publishes_first else functools.partial(self._release, to, made)
            number = log.record([part_of(to, total)], release, push=pushed_by(context))
        # With a standby, both sides compute the step at the same time; the release waits for the bucket's lock.
        changed = self._compute(to, total, context=context)
        if log is None or number is None or self._publishes_first:
            to.publish(changed)
            self._cut_if_wanted(to)
            if log is not None and number is not None:
                log.compare(number, to.number, to.values)
            return
        made.changed[to.number] = changed
        to.pending = made
        log.compare(number, to.number, to.values_at(to.step + 1))

    def _release(self, bucket: Bucket, made: WaitingUpdate) -> None:
        """The standby has the step of a bucket: publish it."""
        with bucket.lock:
            if bucket.pending is not made:
                return
            bucket.pending = None
            bucket.publish(made.changed[bucket.number])
            self._cut_if_wanted(bucket)
        self._published(bucket)

    def apply_together(self, update: ShardUpdate) -> None:
        with self.order:
            if self.log is not None and self._hold_together(self.log, update):
                return
            verdict = update.verdict
            for bucket in self.buckets:
                with bucket.lock:
                    total = update.total_of(bucket)
                    if total is None:
                        continue
                    changed = self._compute(bucket, total, scale=verdict.scale, skip=verdict.skip)
                    bucket.publish(changed, skip=verdict.skip)
                    update.applied(bucket)
                    self._cut_if_wanted(bucket)
                self.observers.on_publish(bucket.number)
            update.closed()

    def _hold_together(self, log: RecordLog, update: ShardUpdate) -> bool:
        """Compute an update of all buckets, one record, published when the standby has it. `order` must be held.

        False if the standby has no bucket yet, or nothing waits for the update any more: nothing was done.
        """
        verdict, made, parts = update.verdict, WaitingUpdate(), []
        for bucket in self.buckets:
            with bucket.lock:
                total = update.total_of(bucket)
                if total is None:
                    return False
                parts.append(part_of(bucket, total))
        number = log.record(
            parts,
            lambda: self._release_together(update, made),
            scale=verdict.scale,
            skip=verdict.skip,
            verdict=verdict,
        )
        if number is None:
            return False
        for bucket in self.buckets:
            with bucket.lock:
                total = update.total_of(bucket)
                if total is None:
                    # A new timeline began meanwhile: none of this will be published.
                    return True
                made.changed[bucket.number] = self._compute(bucket, total, scale=verdict.scale, skip=verdict.skip)
                bucket.pending = made
                log.compare(number, bucket.number, bucket.values_at(bucket.step + 1))
        return True

    def _release_together(self, update: ShardUpdate, made: WaitingUpdate) -> None:
        """The standby has an update of all buckets: publish it."""
        with self.order:
            for bucket in self.buckets:
                with bucket.lock:
                    if bucket.pending is not made:
                        return
                    bucket.pending = None
                    bucket.publish(made.changed[bucket.number], skip=update.verdict.skip)
                    update.applied(bucket)
                    self._cut_if_wanted(bucket)
                self._published(bucket)
            update.closed()

    def record(
        self, parts: Sequence[tuple[BucketView, Partial]], *, scale: float = 1.0, push: AppliedPush | None = None
    ) -> int | None:
        """See Storage. Answers wait for the standby: see passed()."""
        if self.log is None:
            return None
        told = [part_of(bucket, total) for bucket, total in parts]
        return self.log.record(told, scale=scale, skip=not told, push=push)

    def apply_now(
        self, bucket: BucketView, total: Partial, *, scale: float, context: PushContext, record: int | None
    ) -> None:
        to = self.buckets[bucket.number]
        with to.lock:
            to.publish(self._compute(to, total, scale=scale, context=context))
            if record is not None and self.log is not None:
                self.log.compare(record, to.number, to.values)

    def _compute(
        self,
        bucket: Bucket,
        total: Partial,
        *,
        scale: float = 1.0,
        skip: bool = False,
        context: PushContext = TOGETHER,
    ) -> bool:
        """Compute the next values of a bucket whose lock is held, and report the duration."""
        start_s = time.monotonic()
        try:
            changed = bucket.compute(total, scale=scale, skip=skip, context=context)
        except Exception as error:
            self.observers.on_failure(error)
            raise
        self.observers.on_apply(time.monotonic() - start_s)
        return changed

    def _published(self, bucket: Bucket) -> None:
        """A bucket's step was published after its standby had it; no bucket's lock is held."""
        self.observers.on_publish(bucket.number)
        self.observers.on_counted()

    def _cut_if_wanted(self, bucket: Bucket) -> None:
        """Copy the bucket if its new step is to be cut: once the step is reached, before the next is applied.

        If workers run the optimizer, one of them brings the image.
        """
        if self.cuts.wanted(bucket.step) and bucket.has_state:
            self.cuts.store(bucket.image())


def pushed_by(context: PushContext) -> AppliedPush | None:
    """Who has made an update of one bucket, and with it so many; None if all contributors have."""
    if not context.task:
        return None
    return AppliedPush(task=context.task, incarnation=0, last_seq=context.clock, outcome=Outcome.APPLIED)


def part_of(bucket: BucketView, total: Partial) -> RecordPart:
    """A copy of a bucket's input, since the sum's memory may be overwritten. Its lock or `order` must be held."""
    return RecordPart.of(bucket.number, bucket.step, total.values, total.present, bucket.hyper)
