"""What a worker's optimizer works on: its buckets under one plan, and the shards that keep their state for cuts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardline.client.exchange.arrivals import Key
from shardline.client.exchange.shard_exchange import Exchange
from shardline.client.layout import ModelLayout
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.plan import BucketSpec, Plan, tensor_piece
from shardline.core.spec import DTYPES, JobSpec, TensorKind
from shardline.errors import ProtocolError, UnreachableError
from shardline.update import BucketRule, bucket_rule
from shardline.waist import Sender

log = logging.getLogger("shardline.client")


class ServerStates:
    """The shards of one plan and timeline, as a worker brings its state there and takes it from there."""

    def __init__(self, exchange: Exchange, sender: Callable[[], Sender]) -> None:
        self._exchange = exchange
        self._sender = sender

    def take(self, step: int, buckets: Mapping[int, Sequence[int]]) -> list[BucketImage] | None:
        """The state of a step, of these buckets by shard; None if the workers have gone on from it.

        Raises UnreachableError, Restart.
        """
        found: list[BucketImage] = []
        for shard, numbers in sorted(buckets.items()):
            images = self._exchange.state(self._sender(), shard, step, numbers)
            if images is None:
                return None
            found += [replace(image, shard=shard) for image in images]
        return found

    def bring(self, shard: int, images: Sequence[BucketImage]) -> bool:
        """Bring a shard its part of a state; False if it could not be reached and may be tried again."""
        try:
            outcome = self._exchange.bring_state(self._sender(), shard, images)
        except (UnreachableError, ProtocolError) as error:
            log.warning("shard %d: the state for a checkpoint was not taken: %s", shard, error)
            return isinstance(error, ProtocolError)
        if outcome is not Outcome.COUNTED:
            log.info("shard %d: it has no use for the state of this step any more: %s", shard, outcome.name.lower())
        return True


@dataclass(frozen=True, kw_only=True)
class OptimizerBuckets:
    """What the optimizer works on under one plan."""

    plan: Plan
    model: ModelLayout
    pulled: ModelLayout
    """Mean gradients, as the servers publish them; the parameters of a step that the servers were restored to."""
    states: ServerStates
    rules: dict[Key, BucketRule]
    """Of the buckets whose state is here, in the plan's order."""

    def own(self, job: JobSpec, keys: Iterable[Key]) -> bool:
        """Keep the rules of these buckets alone; False if there are new ones: all begin without a state then."""
        wanted = [key for key in keys if self._bucket(key).kind is TensorKind.PARAM]
        complete = self.rules.keys() >= set(wanted)
        if not complete:
            self.rules.clear()
            self.rules.update({key: self._rule(job, key) for key in wanted})
        for key in self.rules.keys() - set(wanted):
            del self.rules[key]
        return complete

    def _bucket(self, key: Key) -> BucketSpec:
        return self.plan.shards[key[0]].buckets[key[1]]

    def _rule(self, job: JobSpec, key: Key) -> BucketRule:
        bucket = self._bucket(key)
        device = self.model.tensors[bucket.slices[0].tensor].device
        return bucket_rule(job.rule, job.schedule, bucket, self.plan.tensors, device)

    def take(self, step: int) -> list[BucketImage] | None:
        buckets: dict[int, list[int]] = {}
        for shard, at in self.rules:
            buckets.setdefault(shard, []).append(at)
        return self.states.take(step, buckets)

    def predict(self, job: JobSpec, stage: int, late: int, *, clock: int) -> dict[str, torch.Tensor]:
        """See WorkerOptimizer.predict. clock: the step of the parameters."""
        found: dict[str, torch.Tensor] = {}
        for key, rule in self.rules.items():
            pieces = self._bucket(key).slices
            if self.plan.tensors[pieces[0].tensor].fragment != stage:
                continue
            twin, values = self._rule(job, key), self.values(key)
            twin.load(*rule.export())
            for step in range(clock, clock + late):
                twin.apply(values, torch.zeros_like(values), clock=step, present=[True] * len(pieces))
            for piece in pieces:
                spec = self.plan.tensors[piece.tensor]
                whole = found.setdefault(spec.name, values.new_empty(spec.shape)).view(-1)
                start = piece.first_row * spec.row_elements
                whole[start : start + piece.elements] = values[piece.offset : piece.end]
        return found

    # Buckets

    def values(self, key: Key) -> torch.Tensor:
        """A copy of a bucket's parameters."""
        whole = self.model.whole(*key)
        return self.model.values(*key, self.rules[key].site.device) if whole is None else whole.clone()

    def mean(self, key: Key) -> tuple[torch.Tensor, list[bool]]:
        """A bucket's mean gradient, as the servers published it, and which slices have one."""
        device, pieces = self.rules[key].site.device, self._bucket(key).slices
        gradient = self.pulled.whole(*key)
        gradient = self.pulled.values(*key, device) if gradient is None else gradient
        # Which slices of a bucket have a gradient: for the others the servers write NaN, which no counted one contains.
        offsets = [piece.offset for piece in pieces if piece.elements]
        absent = iter(gradient[torch.tensor(offsets, dtype=torch.int64, device=gradient.device)].isnan().tolist())
        present = [piece.elements == 0 or not next(absent) for piece in pieces]
        for piece, there in zip(pieces, present, strict=True):
            if not there:
                gradient[piece.offset : piece.end].zero_()
        return gradient, present

    def gathered(self, key: Key, found: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, list[bool]]:
        """The same of gradients, by tensor, that have stayed here: their own memory where it is the whole bucket."""
        bucket = self._bucket(key)
        whole = tensor_piece(self.plan, bucket, found)
        if whole is not None:
            return whole, [True]
        flat = torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype], device=self.rules[key].site.device)
        for piece in bucket.slices:
            if piece.tensor in found:
                start = piece.first_row * self.plan.tensors[piece.tensor].row_elements
                part = found[piece.tensor].reshape(-1)[start : start + piece.elements]
                flat[piece.offset : piece.end].copy_(part)
        return flat, [piece.tensor in found for piece in bucket.slices]
