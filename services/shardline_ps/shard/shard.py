"""One shard: storage, and the server half of the job's consistency. No network here; any thread may call.

With a standby, an update of a step is computed at once and published when the standby has it too; a push is published
at once, and its answers wait. PROTOCOL 1.4.5, 1.8.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardline import consistency
from shardline.codecs.coding import Coding
from shardline.codecs.rows import PLAIN
from shardline.consistency.base import Consistency
from shardline.consistency.server import Terms
from shardline.core.choices import Choices
from shardline.core.contributions import Partial
from shardline.core.image import BucketImage, WorkerSequence
from shardline.core.outcome import Outcome
from shardline.core.plan import Plan
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import AppliedPush, RecordPart
from shardline.core.settings import WORKER
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec, TensorKind
from shardline.errors import ProtocolError
from shardline.rpc.messages.configuration import PsConfiguration
from shardline.server.backend import HostedShard
from shardline.storage.bucket import Bucket
from shardline.storage.cuts import CutBook
from shardline.storage.publication import PlainPublication, Publication
from shardline.storage.shard import ByteCount, Observers, ShardUpdate, Storage
from shardline.storage.table import TableBucket
from shardline.update import bucket_rule, weights
from shardline_ps.shard.summing import Summing, SummingBucket
from shardline_ps.standby.record_log import RecordLog


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings that Configure gives to every shard."""

    plan: Plan
    rule: RuleSpec
    schedule: ScheduleSpec
    consistency: ConsistencySpec
    replicas: int
    """Number of replicas whose contributions make one update."""
    cut_every: int
    aggregates: bool = False
    """Workers run the optimizer: the shard publishes mean gradients."""
    replayed: Choices = field(default_factory=Choices)
    """Choices of another run, which the lead repeats."""
    coding: Coding | None = None
    """Of gradients; None = not encoded."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cold_dir: Path | None = None
    """Folder for rows beyond a table's memory_rows; None = all are in memory."""

    @classmethod
    def of(cls, configuration: PsConfiguration, device: torch.device, cold_dir: Path | None = None) -> ShardSettings:
        """The settings that a configuration gives to shards on this device."""
        return cls(
            plan=configuration.plan,
            rule=configuration.rule,
            schedule=configuration.schedule,
            consistency=configuration.consistency,
            replicas=consistency.of(configuration.consistency).contributors(configuration.replicas),
            cut_every=configuration.cut_every,
            aggregates=configuration.apply == WORKER,
            replayed=configuration.replayed,
            coding=configuration.coding.push,
            device=device,
            cold_dir=cold_dir,
        )


class WaitingUpdate:
    """A computed update of one or more buckets that waits for the standby: by bucket, whether it changes the values."""

    def __init__(self) -> None:
        self.changed: dict[int, bool] = {}


class ShardStorage(Storage):
    """The storage of a shard on a server: with memory that it publishes, a log for its standby, and cuts."""

    def __init__(
        self, number: int, settings: ShardSettings, *, publication: Publication | None = None, observers: Observers
    ) -> None:
        """publication: memory for the published values; None = ordinary memory on the settings' device."""
        spec, mode = settings.plan.shards[number], consistency.of(settings.consistency)
        waiting = ByteCount()
        self.publication = PlainPublication(spec, settings.device) if publication is None else publication
        """Memory of the buckets' values."""
        buckets = [self._bucket(number, index, settings, mode, waiting) for index in range(len(spec.buckets))]
        super().__init__(number, buckets, observers, waiting)
        self._publishing = mode.publishing
        self.cuts = CutBook(len(self.buckets), mode.cuts.interval(settings.cut_every))
        self.log: RecordLog | None = None
        """The records for the standby; None if there is no standby."""

    def _bucket(
        self, shard: int, number: int, settings: ShardSettings, mode: Consistency, waiting: ByteCount
    ) -> Bucket:
        plan = settings.plan
        spec = plan.shards[shard].buckets[number]
        contributions = mode.intake.contributions(spec, settings.replicas, waiting.add)
        if spec.kind is TensorKind.TABLE:
            return TableBucket(
                shard,
                number,
                spec,
                plan.tensors,
                settings.schedule,
                contributions=contributions,
                keeps_previous=mode.publishing.memory(lambda _, keeps: keeps, plan.shards[shard]),
                cold=settings.cold_dir,
            )
        return (SummingBucket if settings.aggregates and spec.kind is TensorKind.PARAM else Bucket)(
            shard,
            number,
            spec,
            plan.tensors,
            functools.partial(bucket_rule, settings.rule, settings.schedule, spec, plan.tensors),
            combined=(settings.coding.bucket(shard, number).codec if settings.coding else PLAIN).at_server.combine,
            pub=mode.publishing.areas(self.publication, number, spec),
            contributions=contributions,
        )

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
            parts, lambda: self._release_together(update, made), scale=verdict.scale, skip=verdict.skip, verdict=verdict
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


class Shard(HostedShard):
    """A shard on a server: with cuts, a standby, and the optimizer's state where workers run it."""

    storage: ShardStorage
    summing: Summing | None

    def __init__(
        self,
        number: int,
        settings: ShardSettings,
        *,
        publication: Publication | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.settings = settings
        storage = ShardStorage(number, settings, publication=publication, observers=observers or Observers())
        self.cuts = storage.cuts
        terms = Terms(
            plan=settings.plan,
            contributors=settings.replicas,
            nan_policy=settings.consistency.nan_policy,
            replayed=settings.replayed,
            weights=weights(settings.rule),
        )
        summing = Summing(number, storage) if settings.aggregates else None
        mode = consistency.of(settings.consistency)
        super().__init__(storage, mode, terms, publication=storage.publication, summing=summing)

    # Reading

    @property
    def initialized(self) -> bool:
        return all(bucket.initialized for bucket in self.buckets)

    @property
    def held_bytes(self) -> int:
        """Bytes of values, optimizer state, partial sums and cuts."""
        return self.storage.held_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of sums that wait for more contributions, or for a verdict. May be read without a lock."""
        return self.storage.waiting.value

    @property
    def log(self) -> RecordLog | None:
        """The records for the standby; None if there is no standby."""
        return self.storage.log

    @property
    def counts_inline(self) -> bool:
        return super().counts_inline and self.log is None

    async def answerable(self) -> None:
        if self.storage.log is not None:
            await self.consistency.publishing.answerable(self.storage.log.passed)

    @property
    def observers(self) -> Observers:
        return self.storage.observers

    # Cuts, restore, stop

    def request_cut(self, step: int, *, stop: bool) -> tuple[bool, int]:
        """Cut at `step`; returns (whether it has passed already, highest step). stop: go no further than it."""
        return self.consistency.cuts.take(self.mode, self.cuts, step, stop=stop), self.step_max

    def restore(self, images: Sequence[BucketImage], sequences: Mapping[str, WorkerSequence] | None = None) -> None:
        """Replace all buckets, or none if an image is missing, duplicated, of another step or doesn't fit.

        sequences: if pushes are numbered, the last push of each worker that the images include; the next one is
        expected.
        Raises ProtocolError or CheckpointError.
        """
        numbers = [image.bucket for image in images]
        if sorted(numbers) != list(range(len(self.buckets))):
            raise ProtocolError(f"shard {self.number} has {len(self.buckets)} buckets; the images are of {numbers}")
        self.consistency.cuts.check(self.number, [image.step for image in images])
        rules = [self.buckets[image.bucket].rule_of(image) for image in images]
        self.cuts.clear()
        self.mode.abandon()
        if self.log is not None:
            self.log.abandon()
        for image, rule in zip(images, rules, strict=True):
            bucket = self.buckets[image.bucket]
            with bucket.lock:
                bucket.restore(image, rule)
        self.mode.restored(sequences or {})
        self.observers.on_counted()
        for bucket in self.buckets:
            self.observers.on_publish(bucket.number)
