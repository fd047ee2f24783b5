"""One shard: storage, and the server half of the job's consistency. No network here; any thread may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardline import consistency
from shardline.consistency.server import Terms
from shardline.core.gradients import Gradient
from shardline.core.image import BucketImage, WorkerSequence
from shardline.errors import ProtocolError
from shardline.server.backend import HostedShard
from shardline.storage.publication import Publication
from shardline.storage.shard import Observers
from shardline.update import weights
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
