"""Synchronous steps; eager ones apply a bucket as soon as every replica's contribution is there. PROTOCOL 1.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import COMMON, Clock, Consistency, Gives
from shardline.consistency.cuts import AT_ONE_STEP, Cuts
from shardline.consistency.intake import APART, TREE, VOTED_TREE, Intake
from shardline.consistency.replica_steps import ReplicaSteps
from shardline.consistency.server import ServerHalf, Terms
from shardline.consistency.spares import SpareContributions, SpareSteps, check_spares, needed
from shardline.consistency.voted import VotedSteps
from shardline.consistency.worker import WorkerHalf
from shardline.core.contributions import Partial, mean
from shardline.core.gradients import nonfinite_names
from shardline.core.reduce import is_finite, stays_finite
from shardline.core.spec import ConsistencySpec, JobSpec, TensorKind
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
    cuts: ClassVar[Cuts] = AT_ONE_STEP
    intake: ClassVar[Intake] = TREE
    gives: ClassVar[frozenset[Gives]] = COMMON | {Gives.EVERY_GRADIENT, Gives.PARTS, Gives.LASTING_VALUES}
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


@dataclass(frozen=True)
class Voted(Eager):
    """Synchronous, and each step is scaled or skipped by one decision for all shards."""

    name: ClassVar[str] = "voted"
    intake: ClassVar[Intake] = VOTED_TREE

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return VotedSteps(storage, terms)


@dataclass(frozen=True)
class Spares(Eager):
    """Synchronous: each step is one update from the gradients of the replicas that are first."""

    gives: ClassVar[frozenset[Gives]] = COMMON
    intake: ClassVar[Intake] = APART

    def needed(self, replicas: int) -> int:
        return needed(replicas, self.spares, self.quorum)

    def held(self, nbytes: int, replicas: int) -> dict[str, int]:
        """See Consistency: one contribution per replica is kept until the lead has chosen."""
        return {"contributions": nbytes * replicas}

    def worker_half(self, job: JobSpec) -> WorkerHalf:
        return SpareContributions(job, by_bucket=False)

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return SpareSteps(storage, terms, self.needed(terms.contributors))


class EagerSteps(ReplicaSteps):
    """The last contribution to a bucket applies its step; buckets do not wait for each other."""

    def complete(self, bucket: Bucket) -> None:
        try:
            total = bucket.contributions.take()
            if bucket.spec.kind in (TensorKind.PARAM, TensorKind.TABLE):
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
        if count == 1 or values is None or stays_finite(total.bound, values.dtype) or is_finite(total.numbers):
            return
        names = ", ".join(bucket.names if total.dim else nonfinite_names(bucket.names, bucket.spec, values))
        error = NonFiniteError(
            f"shard {self.storage.number}, step {bucket.step}: the sum of the gradients of {names} over {count} "
            "replicas has NaN or infinity although each of them is finite; it was not applied. Lower the learning "
            "rate, or train in a wider dtype"
        )
        self.storage.observers.on_failure(error)
        raise error
