"""The job's optimizer on every worker: servers sum gradients, and workers apply what they have summed.

This is BytePS's division of work (Jiang et al., OSDI 2020). All workers hold the same parameters and the same optimizer
state, bucket by bucket, under the very rule that servers would run, so the bits are the servers'. For a cut, the worker
of replica 0 brings its state to the shards; a worker without a state takes it from there, see decision 0032.

In a pipeline a worker has the state of its stages. With one replica there is nothing to sum: gradients stay where they
are computed, and servers only count the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardline import division
from shardline.cadence import Held, LocalTraining, Outgoing, Told
from shardline.cadence.base import UNTOLD, Hyper
from shardline.client.exchange.shard_exchange import Exchange, Restart
from shardline.client.layout import ModelLayout
from shardline.core.image import VALUE, BucketImage
from shardline.core.outcome import Outcome
from shardline.core.plan import BucketSpec, Plan, tensor_piece
from shardline.core.reduce import is_finite
from shardline.core.spec import DTYPES, JobSpec, TensorKind
from shardline.core.tensor_bytes import same_bits
from shardline.division import Key, Share
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
        wanted = [key for key in keys if self.bucket(key).kind is TensorKind.PARAM]
        complete = self.rules.keys() >= set(wanted)
        if not complete:
            self.rules.clear()
            self.rules.update({key: self.rule(job, key) for key in wanted})
        for key in self.rules.keys() - set(wanted):
            del self.rules[key]
        return complete

    def bucket(self, key: Key) -> BucketSpec:
        return self.plan.shards[key[0]].buckets[key[1]]

    def rule(self, job: JobSpec, key: Key) -> BucketRule:
        bucket = self.bucket(key)
        device = self.model.tensors[bucket.slices[0].tensor].device
        return bucket_rule(job.rule, job.schedule, bucket, self.plan.tensors, device)

    def take(self, step: int) -> list[BucketImage] | None:
        buckets: dict[int, list[int]] = {}
        for shard, at in self.rules:
            buckets.setdefault(shard, []).append(at)
        return self.states.take(step, buckets)

    # Buckets

    @torch.no_grad()
    def show(self, values: Mapping[Key, torch.Tensor]) -> None:
        """Set the model's parameters in these buckets."""
        for key, one in values.items():
            self.model.load(*key, one)
        self.model.settle()

    def values(self, key: Key) -> torch.Tensor:
        whole = self.model.whole(*key)
        return self.model.values(*key, self.rules[key].site.device) if whole is None else whole.clone()

    def mean(self, key: Key) -> tuple[torch.Tensor, list[bool]]:
        """A bucket's mean gradient, as the servers published it, and which slices have one."""
        device, pieces = self.rules[key].site.device, self.bucket(key).slices
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
        bucket = self.bucket(key)
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


class WorkerOptimizer(LocalTraining):
    """A worker's parameters and optimizer state of its step. Used by one thread; outlives servers and timelines."""

    def __init__(self, job: JobSpec, held: Held) -> None:
        self._job = job
        self._held = held
        parts = division.of(job)
        # A norm is the servers' to find: it is that of all stages.
        self.keeps = parts.alone and not job.consistency.clip_norm
        """Gradients stay here: nobody else has any of the same parameters."""
        self._repeats = parts.repeats
        """Stages close a step one by one, and begin it again together: this one may then be a step ahead."""
        self._buckets: OptimizerBuckets | None = None
        self._share: Share | None = None
        self.step: int | None = None
        """The step whose parameters and state are here; None if there are none."""
        self._computed: tuple[int | None, set[int]] = None, set()
        """The last step of which this worker ran replicas, and these."""
        self._owed: set[int] = set()
        """Shards that want the state of `_step`."""
        self._brought: set[int] = set()
        """Shards that have been brought it."""
        self._kept: tuple[int | None, Mapping[int, torch.Tensor]] = None, {}
        """A step and its gradients, by tensor, if they stay here."""
        self._before: dict[Key, torch.Tensor] = {}
        """The parameters of the step before, if that may be repeated."""
        self._before_of: int | None = None
        """Which step that is; None if there are none."""
        self._meanwhile: dict[Key, torch.Tensor] | None = None
        """Set while the step before is repeated: the parameters of `_step`."""

    def meet(self, plan: Plan, model: ModelLayout, pulled: ModelLayout, states: ServerStates) -> None:
        """Work with the servers of another timeline, or of another plan: the state of that is taken from them."""
        before = self._buckets
        if before is not None and before.plan.plan_id == plan.plan_id:
            self._buckets = replace(before, pulled=pulled, states=states)
            return
        self._buckets = OptimizerBuckets(plan=plan, model=model, pulled=pulled, states=states, rules={})
        self._share = None
        self._forget()

    def own(self, share: Share) -> None:
        """Work on these buckets from now on, when the step is located. The state of others is forgotten."""
        self._return()
        if not self.buckets.own(self._job, share.keys):
            self._forget()
        self._before = {key: values for key, values in self._before.items() if key in self.buckets.rules}
        self._share = share

    def _forget(self) -> None:
        self.step, self._kept = None, (None, {})
        self._before_of = None
        self._before.clear()

    @property
    def buckets(self) -> OptimizerBuckets:
        assert self._buckets is not None, "meet() comes before the first step"
        return self._buckets

    # Steps

    def arrived(self, step: int, told: Told = UNTOLD) -> None:
        """See LocalTraining.arrived. If located, raises UnreachableError, Restart.

        The servers may have been restored meanwhile: then they publish parameters, and have the state, which counts.
        """
        self._return()
        images = self.buckets.take(step) if told.located and self.step != step else None
        if images is not None:
            self._load(images, step)
        elif self.step is not None and step == self.step + 1 and (not self.keeps or self._kept[0] == self.step):
            self._apply(self.step, told.hyper)
        elif told.located and self._before_of == step and self.step == step + 1:
            self._repeat()
        elif self.step != step:
            raise Restart(f"no server has the optimizer state of step {step}; the chief takes the job back")
        if told.located:
            self._show(TensorKind.FROZEN)
        self._show(TensorKind.BUFFER)
        self._owed = set(told.wants_state)
        # While a step is repeated, the model has the parameters of that one; what is owed leaves when it is closed.
        if self._ran_first and self._meanwhile is None:
            self._bring()

    @torch.no_grad()
    def _apply(self, step: int, hyper: Hyper) -> None:
        """Apply the mean gradients that close a step."""
        buckets = self.buckets
        self.step = None
        for (shard, number), rule in buckets.rules.items():
            device, pieces = rule.site.device, rule.site.bucket.slices
            key = shard, number
            gradient, present = buckets.gathered(key, self._kept[1]) if self.keeps else buckets.mean(key)
            if self._repeats and self._before_of != step:
                self._before[key] = buckets.values(key)
            numbers = hyper.get(buckets.plan.tensors[pieces[0].tensor].group)
            values = buckets.model.whole(shard, number)
            if values is not None:
                if rule.apply(values, gradient, clock=step, present=present, hyper=numbers):
                    # Optimizers and kernels write to memory, past torch's counter of the tensor.
                    buckets.model.mark_written(shard, number)
                continue
            values = buckets.model.values(shard, number, device)
            if rule.apply(values, gradient, clock=step, present=present, hyper=numbers):
                buckets.model.load(shard, number, values)
        buckets.model.settle()
        self.step, self._before_of = step + 1, step if self._repeats else None
        # The next step's gradients take this memory.
        self._kept = None, {}
        self._brought.clear()

    @torch.no_grad()
    def rest(self) -> None:
        """There is nothing to compute now, and nobody goes back before this step: keep its parameters already."""
        if self._repeats and self.step is not None and self._meanwhile is None and self._before_of != self.step:
            self._before_of = None
            for key in self.buckets.rules:
                self._before[key] = self.buckets.values(key)
            self._before_of = self.step

    # A step that other stages have not closed

    def _repeat(self) -> None:
        """Compute with the parameters of the step before again: another stage's worker needs what this one sent it."""
        self._meanwhile = {key: self.buckets.values(key) for key in self.buckets.rules}
        self.buckets.show(self._before)

    def _return(self) -> None:
        """Have the parameters of `_step` in the model."""
        if self._meanwhile is not None:
            self.buckets.show(self._meanwhile)
            self._meanwhile = None

    @torch.no_grad()
    def _load(self, images: Sequence[BucketImage], step: int) -> None:
        """Take a state over from the shards. Raises CheckpointError or ProtocolError if it doesn't fit."""
        buckets = self.buckets
        found = {(image.shard, image.bucket): image for image in images}
        if found.keys() != buckets.rules.keys():
            raise ProtocolError(f"the state of step {step} has {len(found)} buckets; the plan has {len(buckets.rules)}")
        self.step = None
        for key, rule in buckets.rules.items():
            image = found[key]
            begun = (tuple(image.initialized) + (False,) * len(rule.site.bucket.slices))[: len(rule.site.bucket.slices)]
            rule.load(image.tensors, image.scalars, begun)
            buckets.model.load(*key, image.tensors[VALUE].to(rule.site.device))
        buckets.model.settle()
        self.step, self._before_of = step, None
        self._before.clear()
        self._brought.clear()

    @torch.no_grad()
    def _show(self, kind: TensorKind) -> None:
        """Set the model's tensors of a kind to the servers'."""
        for spec in self._held.specs:
            if spec.kind is kind:
                self._held.model[spec.name].copy_(self._held.pulled[spec.name])

    # Cuts

    @property
    def _ran_first(self) -> bool:
        """Whether this worker ran replica 0 in the step that led here."""
        step, replicas = self._computed
        return step is not None and self.step == step + 1 and 0 in replicas

    def _bring(self, *, anyone: bool = False) -> None:
        """Bring replica 0's part of what is owed; anyone: whatever is here, since its worker may be lost."""
        buckets, share = self.buckets, self._share
        assert share is not None, "own() comes before the first step"
        self._return()
        keys = None if anyone else share.of(0)
        for shard in sorted(self._owed):
            images = self.images(shard, keys)
            if not images or buckets.states.bring(shard, images):
                self._owed.discard(shard)
                self._brought.add(shard)

    def bring_all(self) -> None:
        """Bring the state to all shards: this worker has finished, and a cut of its last step may follow."""
        if self._buckets is not None and self._ran_first:
            self._owed = set(range(len(self._buckets.plan.shards))) - self._brought
            self._bring()

    def bring_last(self, step: int, wanting: Iterable[int]) -> None:
        """Bring the state of the step at which the job stops to shards that still want it, whoever ran replica 0."""
        if self.step == step:
            self._owed = set(wanting)
            self._bring(anyone=True)

    def images(self, shard: int, keys: Collection[Key] | None = None) -> list[BucketImage]:
        """The state of a shard as of this worker's step, of these buckets; None = all that are here."""
        assert self.step is not None
        found = []
        for (number, at), rule in self.buckets.rules.items():
            if number == shard and (keys is None or (number, at) in keys):
                states, scalars, initialized = rule.export()
                values = self.buckets.model.values(number, at)
                found.append(
                    BucketImage(
                        shard=shard,
                        bucket=at,
                        step=self.step,
                        version=0,
                        tensors={VALUE: values, **states},
                        scalars=scalars,
                        initialized=initialized,
                    )
                )
        return found

    # Passes

    def enter(self, replica: int, tick: int) -> None:
        self._show(TensorKind.BUFFER)

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """See LocalTraining.take. A state that is still wanted leaves before the gradient that closes its step."""
        if replica == 0 and self._owed and self._meanwhile is None:
            self._bring()
        if self._meanwhile is None:
            self._note(replica, outgoing)
        if self.keeps:
            bad = [name for name, values in outgoing.values.items() if not is_finite(values)]
            outgoing = replace(outgoing, values={}, nonfinite=bad)
        return replace(outgoing, buffers=self._changed(replica))

    def _note(self, replica: int, outgoing: Outgoing) -> None:
        if self._computed[0] != self.step:
            self._computed = self.step, set()
        self._computed[1].add(replica)
        if self.keeps:
            index = self.buckets.plan.index
            self._kept = (
                self.step,
                {index[name]: values if outgoing.keep else values.clone() for name, values in outgoing.values.items()},
            )

    def _changed(self, replica: int) -> dict[str, torch.Tensor]:
        """Buffers that this pass has changed, if they are sent."""
        model, pulled = self._held.model, self._held.pulled
        return {
            spec.name: model[spec.name].clone()
            for spec in self._held.specs
            if self._held.brings_buffers(replica)
            and spec.kind is TensorKind.BUFFER
            and not same_bits(model[spec.name], pulled[spec.name])
        }
