"""One shard: storage, and the server half of the job's consistency. No network here; any thread may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardline import consistency
from shardline.consistency.server import StepWanted, Terms
from shardline.core.gradients import Gradient
from shardline.core.image import BucketImage, WorkerSequence
from shardline.core.outcome import Decision, Outcome
from shardline.storage.publication import Publication
from shardline.storage.shard import Observers
from shardline.update import chosen
from shardline_ps.shard.cuts import check_images
from shardline_ps.shard.settings import ShardSettings
from shardline_ps.shard.storage import ShardStorage
from shardline_ps.shard.summing import Summing
from shardline_ps.standby.record_log import RecordLog

__all__ = ["Gradient", "Shard", "ShardSettings"]


class Shard:
    """What the rest of a ps knows about a shard; see shardline.server.backend.HostedShard for what push and pull use.

    storage: buckets, locks, publication, cuts. mode: what counts, when it is applied, what is served.
    """

    def __init__(
        self,
        number: int,
        settings: ShardSettings,
        *,
        publication: Publication | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.number = number
        self.settings = settings
        self.tensors, self.replicas = len(settings.plan.tensors), settings.replicas
        """See HostedShard; so is `on_host`."""
        self.on_host = settings.device.type == "cpu"
        self.consistency = consistency.of(settings.consistency)
        self.storage = ShardStorage(number, settings, publication=publication, observers=observers or Observers())
        self.buckets = self.storage.buckets
        self.publication = self.storage.publication
        self.cuts = self.storage.cuts
        self.tally = self.storage.tally
        self.summing = Summing(number, self.storage) if settings.aggregates else None
        rule = chosen(settings.rule)
        terms = Terms(
            plan=settings.plan,
            contributors=settings.replicas,
            nan_policy=settings.consistency.nan_policy,
            replayed=settings.replayed,
            share=lambda staleness: rule.share(settings.rule, staleness) or 1.0,
        )
        self.mode = mode = self.consistency.server_half(self.storage, terms)
        # Push and pull are answered by the mode.
        self.contribute, self.push, self.waiting_for = mode.contribute, mode.push, mode.waiting_for
        self.progress, self.last_push = mode.progress, mode.last_push
        self.slowest, self.asked = mode.slowest, mode.asked

    # Reading

    @property
    def position(self) -> tuple[int, int]:
        step, version = self.buckets[0].step, self.buckets[0].version
        for bucket in self.buckets:
            step = bucket.step if bucket.step < step else step
            version = bucket.version if bucket.version < version else version
        return step, version

    @property
    def step_min(self) -> int:
        return min([bucket.step for bucket in self.buckets])

    @property
    def step_max(self) -> int:
        return max([bucket.step for bucket in self.buckets])

    @property
    def version(self) -> int:
        return self.storage.version

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
    def stop_step(self) -> int | None:
        return self.storage.stop_step

    @property
    def counts_inline(self) -> bool:
        return self.on_host and not self.consistency.waits_for_verdict and self.log is None

    def serve(self, bucket: int, want: StepWanted) -> Outcome:
        return self.mode.serve(self.buckets[bucket], want)

    async def answerable(self) -> None:
        log = self.storage.log
        if log is not None and not self.consistency.publishes_after_standby:
            await log.passed()

    @property
    def observers(self) -> Observers:
        return self.storage.observers

    # Contributions

    def initialize(self, bucket: int, values: torch.Tensor) -> Decision:
        held = self.buckets[bucket]
        with held.lock:
            fresh = held.initialize(values)
        self.observers.on_publish(bucket)
        return Decision(Outcome.COUNTED if fresh else Outcome.DUPLICATE)

    # Cuts, restore, stop

    def request_cut(self, step: int, *, stop: bool) -> tuple[bool, int]:
        """Cut at `step`; returns (whether it has passed already, highest step). stop: go no further than it."""
        if not self.consistency.consistent_cuts:
            with self.storage.order:
                self.mode.settle()
                images = []
                for bucket in self.buckets:
                    with bucket.lock:
                        images.append(bucket.image())
                # Taken at the same instant: a restored shard must know which pushes it includes.
                sequences = self.mode.sequences()
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
