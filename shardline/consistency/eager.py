"""Eager synchronous steps: a bucket applies a step as soon as every replica's contribution is there. PROTOCOL 1.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import Clock, Consistency
from shardline.consistency.replica_steps import ReplicaSteps
from shardline.consistency.server import ServerHalf, Terms
from shardline.consistency.spares import Spares, check_spares
from shardline.consistency.voted import Voted
from shardline.core.contributions import Partial, mean
from shardline.core.gradients import nonfinite_names
from shardline.core.reduce import is_finite, stays_finite
from shardline.core.spec import ConsistencySpec, TensorKind
from shardline.errors import NonFiniteError
from shardline.storage.bucket import Bucket
from shardline.storage.shard import Storage


@dataclass(frozen=True)
class Eager(Consistency):
    """Synchronous: each step is one update from the gradients of all replicas, or of the first ones.

    spares: number of replicas that a step does not wait for. quorum: the same as a fraction, which it does wait for.
    """

    name: ClassVar[str] = "sync"
    clock: ClassVar[Clock] = Clock.STEP
    keeps_previous: ClassVar[bool] = True
    sums_in_tree: ClassVar[bool] = True
    pulls_by_step: ClassVar[bool] = True
    publishes_after_standby: ClassVar[bool] = True
    consistent_cuts: ClassVar[bool] = True
    bit_exact: ClassVar[bool] = True
    spares: int = 0
    quorum: float = 1.0

    def __post_init__(self) -> None:
        check_spares(self.spares, self.quorum)

    def under(self, spec: ConsistencySpec) -> Consistency:
        """Clipping by the global norm, skipping a step and spares require one decision for all shards."""
        if self.spares or self.quorum < 1.0:
            return Spares(self.spares, self.quorum)
        return Voted() if spec.clip_norm > 0.0 or spec.nan_policy == "skip" else self

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return EagerSteps(storage, terms)


class EagerSteps(ReplicaSteps):
    """The last contribution to a bucket applies its step; buckets do not wait for each other."""

    def complete(self, bucket: Bucket) -> None:
        try:
            total = bucket.contributions.take()
            if bucket.spec.kind is TensorKind.PARAM:
                total = mean(total, self.divisor)
                self._check_sum(bucket, total)
            self.storage.apply_bucket(bucket, total)
        except Exception:
            # Nothing was published: forget the contributions, so that they can be sent again.
            bucket.contributions.clear()
            bucket.hyper = None
            raise

    def noted(self, bucket: Bucket, step: int, *, ready: bool) -> None:
        if ready:
            self.storage.observers.on_publish(bucket.number)

    def _check_sum(self, bucket: Bucket, total: Partial) -> None:
        """Check that the sum is finite, even though all contributions are; a sum that is not is never applied."""
        values, count = total.values, self.terms.contributors
        if count == 1 or values is None or stays_finite(total.bound, values.dtype) or is_finite(values):
            return
        names = ", ".join(nonfinite_names(bucket.names, bucket.spec, values))
        error = NonFiniteError(
            f"shard {self.storage.number}, step {bucket.step}: the sum of the gradients of {names} over {count} "
            "replicas has NaN or infinity although each of them is finite; it was not applied. Lower the learning "
            "rate, or train in a wider dtype"
        )
        self.storage.observers.on_failure(error)
        raise error
