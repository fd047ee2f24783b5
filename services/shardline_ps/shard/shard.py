"""One shard: storage, and the server half of the job's consistency. No network here; any thread may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardline import consistency
from shardline.consistency.server import Terms
from shardline.core.gradients import Gradient
from shardline.core.image import BucketImage, WorkerSequence
from shardline.server.backend import HostedShard
from shardline.storage.publication import Publication
from shardline.storage.shard import Observers
from shardline.update import chosen
from shardline_ps.shard.cuts import check_images
from shardline_ps.shard.settings import ShardSettings
from shardline_ps.shard.storage import ShardStorage
from shardline_ps.shard.summing import Summing
from shardline_ps.standby.record_log import RecordLog

__all__ = ["Gradient", "Shard", "ShardSettings"]


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
        rule = chosen(settings.rule)
        terms = Terms(
            plan=settings.plan,
            contributors=settings.replicas,
            nan_policy=settings.consistency.nan_policy,
            replayed=settings.replayed,
            share=lambda staleness: rule.share(settings.rule, staleness) or 1.0,
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
        log = self.storage.log
        if log is not None and not self.consistency.publishes_after_standby:
            await log.passed()

    @property
    def observers(self) -> Observers:
        return self.storage.observers

    # Cuts, restore, stop

    def request_cut(self, step: int, *, stop: bool) -> tuple[bool, int]:
        """Cut at `step`; returns (whether it has passed already, highest step). stop: go no further than it."""
        if not self.consistency.consistent_cuts:
            with self.storage.order:
                # Taken at the same instant: a restored shard must know which pushes it includes.
                sequences = self.mode.settle()
                images = []
                for bucket in self.buckets:
                    with bucket.lock:
                        images.append(bucket.image())
            self.cuts.store_all(step, images, sequences)
            if stop:
                self.storage.stop_step = 0
            return False, self.step_max
        # Registered first: a bucket that reaches the step meanwhile then copies itself.
        self.cuts.request(step)
        before = self.stop_step
        if stop:
            self.storage.stop_step = step
        for bucket in self.buckets:
            with bucket.lock:
                # A step waiting for the standby is computed already: the optimizer's state is that of the next step.
                if bucket.step + (bucket.pending is not None) > step:
                    # The request came too late: stop nothing, and keep no copy that can't be completed.
                    self.storage.stop_step = before
                    self.cuts.withdraw(step)
                    return True, self.step_max
                if bucket.step == step and bucket.initialized:
                    image = bucket.image() if bucket.has_state else self.cuts.offered(bucket.number, step)
                    if image is not None:
                        self.cuts.store(image)
        return False, self.step_max

    def restore(self, images: Sequence[BucketImage], sequences: Mapping[str, WorkerSequence] | None = None) -> None:
        """Replace all buckets, or none if an image is missing, duplicated, of another step or doesn't fit.

        sequences: if pushes are numbered, the last push of each worker that the images include; the next one is
        expected.
        Raises ProtocolError or CheckpointError.
        """
        check_images(self.number, len(self.buckets), images, one_step=self.consistency.consistent_cuts)
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
