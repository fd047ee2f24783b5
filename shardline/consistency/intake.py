"""How servers take in pushes, and what they publish of an update: what a mode tells the data plane. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from shardline.consistency.worker import OwnPushes, SharedSteps, WorkerHalf
from shardline.core.contributions import Contributions
from shardline.core.plan import BucketSpec, ShardSpec
from shardline.core.reduce import sums_of
from shardline.core.spec import JobSpec
from shardline.storage.bucket import Bucket
from shardline.storage.publication import Publication, num_areas

T = TypeVar("T")


class Intake:
    """Each bucket counts as soon as it is complete, and is kept apart from those of others. So are initial values."""

    def number(self, seq: int) -> int | None:
        """The number (seq) under which a push counts as a whole at its commit; None: each bucket counts by itself."""
        return None

    def sums(self, mask: int, replicas: int) -> int:
        """Most partial sums that a bucket with the replicas in `mask` can still have; 0 = it has none, or no more."""
        return 0

    def place(self, bucket: int) -> int | None:
        """The bucket whose partial sums a contribution may join; None if it joins none."""
        return None

    def contributions(self, bucket: BucketSpec, replicas: int, on_held: Callable[[int], None]) -> Contributions:
        """What keeps the contributions to a bucket's open step; on_held: see there."""
        return Contributions(bucket, replicas, on_held=on_held, in_tree=self.place(0) is not None)

    def touched(self, buckets: Sequence[Bucket], numbers: Iterable[int]) -> Iterable[Bucket]:
        """Those of a shard's buckets that are locked while contributions to these numbers are counted."""
        return [buckets[number] for number in numbers]

    def together(self, shard: ShardSpec) -> int:
        """Bytes that a sender may bring before any of them counts, or may count out of order."""
        return shard.nbytes

    def replies(self, nbytes: int) -> int:
        """Bytes of a reply that is made as a whole, right after the push, of a shard with `nbytes`."""
        return 0

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return SharedSteps(job)


class Tree(Intake):
    """Buckets are parts of sums over replicas in the canonical tree, of which a worker may send a whole block."""

    def sums(self, mask: int, replicas: int) -> int:
        return sums_of(replicas, mask)[1]

    def place(self, bucket: int) -> int | None:
        return bucket

    def together(self, shard: ShardSpec) -> int:
        return max((bucket.nbytes for bucket in shard.buckets), default=0)


class Decided(Intake):
    """A complete step waits for the lead's decision for all shards."""

    def touched(self, buckets: Sequence[Bucket], numbers: Iterable[int]) -> Iterable[Bucket]:
        return buckets

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return SharedSteps(job, by_bucket=False)


class DecidedTree(Tree, Decided):
    """A complete sum waits too."""

    def sums(self, mask: int, replicas: int) -> int:
        return max(1, super().sums(mask, replicas))


class Numbered(Intake):
    """A push is numbered and counted as a whole. A pull in its call may have to wait for others."""

    def number(self, seq: int) -> int | None:
        return seq

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return OwnPushes(job)


class AnsweredAtOnce(Numbered):
    """A pull in its call is answered with the values right after the push, before anybody else's."""

    def replies(self, nbytes: int) -> int:
        return nbytes


INITIAL, TREE, APART, VOTED_TREE = Intake(), Tree(), Decided(), DecidedTree()
NUMBERED, ANSWERED = Numbered(), AnsweredAtOnce()


class Publishing:
    """The latest values of a bucket can be pulled; a standby must have an update before its push is answered."""

    _keeps_previous: ClassVar[bool] = False

    def nbytes(self, bucket: BucketSpec) -> int:
        """Bytes of a bucket's published values."""
        return bucket.nbytes * num_areas(bucket, keeps_previous=self._keeps_previous)

    def areas(self, publication: Publication, number: int, bucket: BucketSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """A bucket's values by step & 1: twice the same tensor if the previous step's are not kept."""
        first = publication.tensor(0, number)
        two = num_areas(bucket, keeps_previous=self._keeps_previous) == 2
        return first, publication.tensor(1, number) if two else first

    def memory(self, make: Callable[[ShardSpec, bool], T], shard: ShardSpec) -> T:
        """A shard's memory. make(shard, whether the previous step's values are kept)."""
        return make(shard, self._keeps_previous)

    def release(self, release: Callable[[], None]) -> Callable[[], None] | None:
        """What publishes an update once the standby has it; None: it is published at once, and answers wait instead."""
        return None

    async def answerable(self, passed: Callable[[], Awaitable[None]]) -> None:
        """Return once a push may be answered. passed: waits until the standby has everything recorded so far."""
        await passed()


class BothSteps(Publishing):
    """The previous step's values too, which a replaced worker may still need; a standby has an update before that."""

    _keeps_previous = True

    def release(self, release: Callable[[], None]) -> Callable[[], None] | None:
        return release

    async def answerable(self, passed: Callable[[], Awaitable[None]]) -> None: ...


LATEST, BOTH_STEPS = Publishing(), BothSteps()


class BatchChoice:
    """The chief assigns replicas to workers; the batch of a replica follows from the step."""

    why_no_lease: ClassVar[str] = "synchronous: batches follow from the step"

    def leased(self, job: JobSpec) -> int:
        """Number of batches that the chief leases one by one, and again if a worker dies; 0 = none."""
        return 0

    def stored(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a checkpoint's manifest. cursor: which leases were done."""
        return {}

    def next(self, step: int, batches: Iterator[int]) -> int:
        """Number of the batch, or of the step with one batch per replica, that a worker computes next."""
        return step


class LeasedBatches(BatchChoice):
    """The chief leases batches one by one. A script's workers choose their own."""

    why_no_lease = "a script, which chooses batches"

    def leased(self, job: JobSpec) -> int:
        return 0 if job.script else job.steps

    def stored(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        done = sum(end - first for first, end in cursor.get("done", []))
        return {"leases": dict(cursor), "cursor": {"batch": done}}

    def next(self, step: int, batches: Iterator[int]) -> int:
        return next(batches)


OF_REPLICAS, LEASED = BatchChoice(), LeasedBatches()
