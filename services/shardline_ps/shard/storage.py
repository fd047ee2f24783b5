"""The storage of one shard: its buckets, and the path of an update from computed to published.

With a standby, an update of a step is computed at once and published when the standby has it too; a push is published
at once, and its answers wait. PROTOCOL 1.4.5, 1.8.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from shardline import consistency
from shardline.codecs.coding import PLAIN
from shardline.core.contributions import Partial
from shardline.core.outcome import Outcome
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import AppliedPush, RecordPart
from shardline.core.spec import TensorKind
from shardline.storage.bucket import Bucket
from shardline.storage.cuts import CutBook
from shardline.storage.publication import PlainPublication, Publication
from shardline.storage.shard import ByteCount, Observers, ShardUpdate, Storage
from shardline.update import bucket_rule
from shardline_ps.shard.settings import ShardSettings
from shardline_ps.shard.summing import SummingBucket
from shardline_ps.standby.record_log import RecordLog


class WaitingUpdate:
    """A computed update of one or more buckets that waits for the standby: by bucket, whether it changes the values."""

    def __init__(self) -> None:
        self.changed: dict[int, bool] = {}


class ShardStorage(Storage):
    """The storage of a shard on a server: with memory that it publishes, a log for its standby, and cuts."""

    def __init__(
        self,
        number: int,
        settings: ShardSettings,
        *,
        publication: Publication | None = None,
        observers: Observers,
    ) -> None:
        """publication: memory for the published values; None = ordinary memory on the settings' device."""
        spec, mode = settings.plan.shards[number], consistency.of(settings.consistency)
        waiting = ByteCount()
        self.publication = PlainPublication(spec, settings.device) if publication is None else publication
        """Memory of the buckets' values."""
        buckets = [
            (SummingBucket if settings.aggregates and bucket.kind is TensorKind.PARAM else Bucket)(
                number,
                index,
                bucket,
                settings.plan.tensors,
                functools.partial(bucket_rule, settings.rule, settings.schedule, bucket, settings.plan.tensors),
                combined=(settings.coding.bucket(number, index).codec if settings.coding else PLAIN).at_server.combine,
                pub=mode.publishing.areas(self.publication, index, bucket),
                contributions=mode.intake.contributions(bucket, settings.replicas, waiting.add),
            )
            for index, bucket in enumerate(spec.buckets)
        ]
        super().__init__(number, buckets, observers, waiting)
        self._publishing = mode.publishing
        self.cuts = CutBook(len(self.buckets), mode.cuts.interval(settings.cut_every))
        self.log: RecordLog | None = None
        """The records for the standby; None if there is no standby."""

    @property
    def held_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets) + self.waiting.value + self.cuts.held_bytes

    # Updates

    def apply_bucket(self, bucket: Bucket, total: Partial, context: PushContext = TOGETHER) -> None:
        log, made = self.log, WaitingUpdate()
        if log is None:
            super().apply_bucket(bucket, total, context)
            return
        release = self._publishing.release(functools.partial(self._release, bucket, made))
        number = log.record([part_of(bucket, total)], release, push=pushed_by(context))
        # Both sides compute the step at the same time; the release waits for the bucket's lock.
        if number is None or release is None:
            super().apply_bucket(bucket, total, context)
            if number is not None:
                log.compare(number, bucket.number, bucket.values)
            return
        made.changed[bucket.number] = self.compute(bucket, total, context=context)
        bucket.pending = made
        log.compare(number, bucket.number, bucket.values_at(bucket.step + 1))

    def _release(self, bucket: Bucket, made: WaitingUpdate) -> None:
        """The standby has the step of a bucket: publish it."""
        with bucket.lock:
            if bucket.pending is not made:
                return
            bucket.pending = None
            bucket.publish(made.changed[bucket.number])
            self.closed(bucket)
        self._published(bucket)

    def together(self, update: ShardUpdate) -> None:
        if self.log is None or not self._hold_together(self.log, update):
            super().together(update)

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
                made.changed[bucket.number] = self.compute(bucket, total, scale=verdict.scale, skip=verdict.skip)
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
                    self.closed(bucket)
                self._published(bucket)
            update.closed()

    def record(
        self, parts: Sequence[tuple[Bucket, Partial]], *, scale: float = 1.0, push: AppliedPush | None = None
    ) -> int | None:
        """See Storage. Answers wait for the standby: see passed()."""
        if self.log is None:
            return None
        told = [part_of(bucket, total) for bucket, total in parts]
        return self.log.record(told, scale=scale, skip=not told, push=push)

    def apply_now(
        self, bucket: Bucket, total: Partial, *, scale: float, context: PushContext, record: int | None
    ) -> None:
        with bucket.lock:
            bucket.publish(self.compute(bucket, total, scale=scale, context=context))
            # Under the same lock: a restore takes no `order`, and must not come between the update and its digest.
            if record is not None and self.log is not None:
                self.log.compare(record, bucket.number, bucket.values)

    def _published(self, bucket: Bucket) -> None:
        """A bucket's step was published after its standby had it; no bucket's lock is held."""
        self.observers.on_publish(bucket.number)
        self.observers.on_counted()

    def closed(self, bucket: Bucket) -> None:
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


def part_of(bucket: Bucket, total: Partial) -> RecordPart:
    """A copy of a bucket's input, since the sum's memory may be overwritten. Its lock or `order` must be held."""
    return RecordPart.of(bucket.number, bucket.step, total.values, total.present, bucket.hyper)
