"""Steps that are made and not published yet: their standby has to hold them first. PROTOCOL 1.4.5, 1.8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardline.core.contributions import Partial
from shardline.core.records import Applied, AppliedPush, Part
from shardline.core.spec import TensorKind
from shardline_ps.shard.bucket import Bucket
from shardline_ps.shard.gradients import Gradient, Staged, on_device
from shardline_ps.standby.record_log import ReplicaLog

if TYPE_CHECKING:
    from shardline_ps.shard.shard import Shard


def part_of(bucket: Bucket, total: Partial) -> Part:
    """What a bucket is about to get, copied: the sum's memory may be written over. Its lock held."""
    return Part.of(bucket.number, bucket.step, total.values, total.present, bucket.hyper)


def hold_bucket(shard: Shard, log: ReplicaLog, bucket: Bucket, total: Partial) -> bool:
    """Make a complete step of one bucket, to be published when the standby has it. The bucket's lock held.

    False where the standby doesn't hold the bucket yet: nothing was done.
    """
    token = object()
    changed: list[bool] = []

    def release() -> None:
        with bucket.lock:
            if bucket.pending is not token:
                return
            bucket.pending = None
            bucket.publish(changed[0])
            shard.cut_if_wanted(bucket)
        shard.published(bucket)

    number = log.record([part_of(bucket, total)], release)
    if number is None:
        return False
    # Both sides make the step at the same time; release() waits for the bucket's lock.
    changed.append(shard.compute(bucket, total))
    bucket.pending = token
    log.compare(number, bucket.number, bucket.values_at(bucket.step + 1))
    return True


def hold_verdict(shard: Shard, log: ReplicaLog, staged: Staged, *, scale: float, skip: bool) -> bool:
    """The same for a voted step in all buckets, which is one record. shard.order held.

    False where the standby holds no bucket yet, or the shard was restored since the vote: nothing was done.
    """
    verdict = Applied(step=staged.step, scale=scale, skip=skip)
    token = object()
    changed: dict[int, bool] = {}

    def release() -> None:
        with shard.order:
            for bucket in shard.buckets:
                with bucket.lock:
                    if bucket.pending is not token:
                        return
                    bucket.pending = None
                    bucket.publish(changed[bucket.number], skip=skip)
                    shard.let_go(staged, bucket.number)
                    shard.cut_if_wanted(bucket)
                shard.published(bucket)
            shard.voted_step_closed(staged, verdict)

    parts = []
    for bucket in shard.buckets:
        with bucket.lock:
            if not shard.open_for(bucket, staged):
                return False
            parts.append(part_of(bucket, staged.totals[bucket.number]))
    number = log.record(parts, release, scale=scale, skip=skip, verdict=verdict)
    if number is None:
        return False
    for bucket in shard.buckets:
        with bucket.lock:
            if not shard.open_for(bucket, staged):
                # A new history began meanwhile: none of this will be published.
                return True
            factor = factor_of(bucket, scale)
            changed[bucket.number] = shard.compute(bucket, staged.totals[bucket.number], scale=factor, skip=skip)
            bucket.pending = token
            log.compare(number, bucket.number, bucket.values_at(bucket.step + 1))
    return True


def record_push(
    log: ReplicaLog, totals: Sequence[tuple[Bucket, Partial]], scale: float, push: AppliedPush
) -> int | None:
    """Tell the standby of a push that is about to be applied; its answers wait. The shard's lock held."""
    parts = [part_of(bucket, total) for bucket, total in totals]
    return log.record(parts, scale=scale, skip=not totals, push=push)


def factor_of(bucket: Bucket, scale: float) -> float:
    """Of a verdict's scale, what a bucket's values are multiplied by."""
    return scale if bucket.spec.kind is TensorKind.PARAM else 1.0


def totals_of(
    buckets: Sequence[Bucket], gradients: Mapping[int, Gradient], hyper: Mapping[int, Mapping[str, float]]
) -> list[tuple[Bucket, Partial]]:
    """What each bucket gets of an asynchronous push, on its device; its hyper-parameters are set. Shard's lock held."""
    totals = []
    for bucket in buckets:
        gradient, total = gradients.get(bucket.number), Partial(None, ())
        if gradient is not None:
            values, borrowed = on_device(gradient, bucket.device)
            total = Partial(values, gradient.present, borrowed)
        with bucket.lock:
            bucket.hyper = hyper.get(bucket.group)
        totals.append((bucket, total))
    return totals
