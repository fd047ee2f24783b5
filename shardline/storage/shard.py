"""The storage of one shard: its buckets, the locks around several of them, and the way of an update into them.

Locks: a bucket's lock guards the bucket. `order` is held while several buckets are updated as one, and while a bucket
is copied for a standby. Lock order: `order`, bucket's lock, `lock` (the tally).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardline.core.contributions import Partial
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import Applied, AppliedPush
from shardline.storage.bucket import Bucket

Hyper = Mapping[int, Mapping[str, float]]
"""Hyper-parameters sent with a contribution, by parameter group."""


@dataclass
class Tally:
    """Counts for status and metrics. Guarded by the storage's lock."""

    pushes: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    skipped_steps: int = 0
    duplicate_mismatches: int = 0

    def applied(self, staleness: int) -> None:
        self.pushes += 1
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Callbacks for events of a shard; a standby has none. Called from any thread; none of them may block.

    Called without a bucket's lock, except on_failure.
    """

    on_publish: Callable[[int], None] = lambda bucket: None
    """A bucket has new values, or waiting pulls have to check again."""
    on_counted: Callable[[], None] = lambda: None
    """Contributions were counted or dropped."""
    on_complete: Callable[[int], None] = lambda step: None
    """All contributions of a step that needs a verdict have arrived."""
    on_barrier: Callable[[float], None] = lambda wait_s: None
    """Seconds from a step's first contribution to its last."""
    on_apply: Callable[[float], None] = lambda seconds: None
    """Seconds that the update rule took on one bucket."""
    on_failure: Callable[[Exception], None] = lambda error: None
    """An update can't be applied, so the job can't continue. Called with locks held."""


class ShardUpdate(Protocol):
    """One decision about all buckets of a shard."""

    @property
    def verdict(self) -> Applied:
        """The verdict."""

    def total_of(self, bucket: Bucket) -> Partial | None:
        """A bucket's gradient; None if the bucket does not wait for this update any more. Call with its lock held."""

    def applied(self, bucket: Bucket) -> None:
        """Note that a bucket has published the update. Call with its lock held."""

    def closed(self) -> None:
        """Note that all buckets have published it. Call with `order` held."""


class ByteCount:
    """Bytes of sums that wait for more contributions or a verdict. Buckets refer to it rather than to their shard."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0
        """May be read without a lock."""

    def add(self, difference: int) -> None:
        with self._lock:
            self.value += difference


class Storage:
    """Buckets whose updates are published at once. A subclass may make them wait, or do more at each step."""

    def __init__(self, number: int, buckets: Sequence[Bucket], observers: Observers, waiting: ByteCount) -> None:
        """number: of the shard. observers: replaced when a standby becomes the primary. waiting: what the buckets'
        contributions count too.
        """
        self.number = number
        self.buckets = list(buckets)
        """In the plan's order."""
        self.observers = observers
        self.waiting = waiting
        self.lock = threading.Lock()
        self.order = threading.Lock()
        self.tally = Tally()
        self.stop_step: int | None = None
        """Last step of the job, if known."""

    @property
    def version(self) -> int:
        """Number of updates that every bucket has seen."""
        return min([bucket.version for bucket in self.buckets])

    def hold(self, difference: int) -> None:
        """Change the bytes of waiting sums by this difference; the buckets' own contributions count separately."""
        self.waiting.add(difference)

    def check_hyper(self, bucket: Bucket, hyper: Hyper | None) -> None:
        """Raise JobError or ProtocolError if the rule does not take these hyper-parameters."""
        if hyper and bucket.rule is not None and (numbers := hyper.get(bucket.group)):
            bucket.rule.check_hyper(numbers)

    def apply_bucket(self, bucket: Bucket, total: Partial, context: PushContext = TOGETHER) -> None:
        """Apply a step to one bucket, its lock held, and publish it."""
        bucket.publish(self.compute(bucket, total, context=context))
        self.closed(bucket)

    def apply_together(self, update: ShardUpdate) -> None:
        """Apply a decision to all buckets as one; takes `order` and their locks."""
        with self.order:
            self.together(update)

    def together(self, update: ShardUpdate) -> None:
        """See apply_together(); `order` is held."""
        verdict = update.verdict
        for bucket in self.buckets:
            with bucket.lock:
                total = update.total_of(bucket)
                if total is None:
                    continue
                changed = self.compute(bucket, total, scale=verdict.scale, skip=verdict.skip)
                bucket.publish(changed, skip=verdict.skip)
                update.applied(bucket)
                self.closed(bucket)
            self.observers.on_publish(bucket.number)
        update.closed()

    def record(
        self, parts: Sequence[tuple[Bucket, Partial]], *, scale: float = 1.0, push: AppliedPush | None = None
    ) -> int | None:
        """Record a push for the standby; returns the record's number, None without a standby. `order` held.

        push: None for a decision about these buckets that no push has caused; see ServerHalf.settle().
        """
        return None

    def apply_now(
        self, bucket: Bucket, total: Partial, *, scale: float, context: PushContext, record: int | None
    ) -> None:
        """Apply to one bucket and publish at once; takes its lock. record: from record(). `order` held."""
        with bucket.lock:
            bucket.publish(self.compute(bucket, total, scale=scale, context=context))
            self.closed(bucket)

    def compute(
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

    def closed(self, bucket: Bucket) -> None:
        """A bucket, whose lock is held, has published a step."""
