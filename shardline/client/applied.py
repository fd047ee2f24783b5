"""The job's optimizer on every worker: servers sum gradients, and workers apply what they have summed.

This is BytePS's division of work (Jiang et al., OSDI 2020). All workers hold the same parameters and the same optimizer
state, bucket by bucket, under the very rule that servers would run, so the bits are the servers'. For a cut, the worker
of replica 0 brings its state to the shards; a worker without a state takes it from there, see decision 0032.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shardline.cadence import Held, LocalTraining, Outgoing, Told
from shardline.cadence.base import UNTOLD, Hyper
from shardline.client.exchange.outcomes import Restart
from shardline.core.exchange import Sender
from shardline.core.image import VALUE, BucketImage
from shardline.core.outcome import Outcome
from shardline.core.plan import Plan, Slice
from shardline.core.spec import JobSpec, TensorKind
from shardline.core.tensor_bytes import same_bits
from shardline.errors import ProtocolError, UnreachableError
from shardline.update import BucketRule, bucket_rule

log = logging.getLogger("shardline.client")

Key = tuple[int, int]
"""(shard, bucket)."""


class Exchanges(Protocol):
    """The part of Exchange that is used here."""

    def state(self, sender: Sender, shard: int, step: int) -> Sequence[BucketImage] | None:
        """See Exchange.state."""

    def bring_state(self, sender: Sender, shard: int, images: Sequence[BucketImage]) -> Outcome:
        """See Exchange.bring_state."""


class TensorLayout(Protocol):
    """A worker's tensors in the plan's layout: the part of ModelLayout that is used here."""

    tensors: list[torch.Tensor]

    def values(self, shard: int, bucket: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """See ModelLayout."""

    def whole(self, shard: int, bucket: int) -> torch.Tensor | None:
        """See ModelLayout."""

    def load(self, shard: int, bucket: int, values: torch.Tensor) -> None:
        """See ModelLayout."""

    def settle(self) -> None:
        """See ModelLayout."""


class ServerStates:
    """The shards of one plan and timeline, as a worker brings its state there and takes it from there."""

    def __init__(self, shards: Sequence[int], exchange: Exchanges, sender: Callable[[], Sender]) -> None:
        self._shards = shards
        self._exchange = exchange
        self._sender = sender

    def take(self, step: int) -> list[BucketImage] | None:
        """The state of a step; None if the workers have gone on from it. Raises UnreachableError, Restart."""
        found: list[BucketImage] = []
        for shard in self._shards:
            images = self._exchange.state(self._sender(), shard, step)
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
class Ground:
    """What the optimizer works on under one plan."""

    plan: Plan
    model: TensorLayout
    pulled: TensorLayout
    """Mean gradients, as the servers publish them; the parameters of a step that the servers were restored to."""
    states: ServerStates
    rules: Mapping[Key, BucketRule]


class AppliedHere(LocalTraining):
    """A worker's parameters and optimizer state of its step. Used by one thread; outlives servers and timelines."""

    def __init__(self, job: JobSpec, held: Held) -> None:
        self._job = job
        self._held = held
        self._ground: Ground | None = None
        self._step: int | None = None
        """The step whose parameters and state are here; None if there are none."""
        self._computed: tuple[int | None, set[int]] = None, set()
        """The last step of which this worker ran replicas, and these."""
        self._owed: set[int] = set()
        """Shards that want the state of `_step`."""
        self._brought: set[int] = set()
        """Shards that have been brought it."""

    def meet(self, plan: Plan, model: TensorLayout, pulled: TensorLayout, states: ServerStates) -> None:
        """Work with the servers of another timeline, or of another plan: the state of that is taken from them."""
        before = self._ground
        if before is not None and before.plan.plan_id == plan.plan_id:
            self._ground = replace(before, pulled=pulled, states=states)
            return
        self._ground = Ground(plan=plan, model=model, pulled=pulled, states=states, rules=self._rules(plan, model))
        self._step = None

    def _rules(self, plan: Plan, model: TensorLayout) -> dict[Key, BucketRule]:
        job = self._job
        return {
            (number, at): bucket_rule(
                job.rule, job.schedule, bucket, plan.tensors, model.tensors[bucket.slices[0].tensor].device
            )
            for number, shard in enumerate(plan.shards)
            for at, bucket in enumerate(shard.buckets)
            if bucket.kind is TensorKind.PARAM
        }

    @property
    def ground(self) -> Ground:
        """The plan and servers in force."""
        assert self._ground is not None, "meet() comes before the first step"
        return self._ground

    # Steps

    def began(self, step: int) -> None:
        """See LocalTraining.began: what it begins with comes with arrived()."""

    def arrived(self, step: int, told: Told = UNTOLD) -> None:
        """See LocalTraining.arrived. If located, raises UnreachableError, Restart.

        The servers may have been restored meanwhile: then they publish parameters, and have the state, which counts.
        """
        images = self.ground.states.take(step) if told.located and self._step != step else None
        if images is not None:
            self._load(images, step)
        elif self._step is not None and step == self._step + 1:
            self._apply(self._step, told.hyper)
        elif self._step != step:
            raise Restart(f"no server has the optimizer state of step {step}; the chief takes the job back")
        if told.located:
            self._show(TensorKind.FROZEN)
        self._show(TensorKind.BUFFER)
        self._owed = set(told.wants_state)
        if self._ran_first:
            self._bring()

    @torch.no_grad()
    def _apply(self, step: int, hyper: Hyper) -> None:
        """Apply the mean gradients that close a step."""
        ground = self.ground
        self._step = None
        for (shard, number), rule in ground.rules.items():
            device, pieces = rule.site.device, rule.site.bucket.slices
            gradient = ground.pulled.whole(shard, number)
            gradient = ground.pulled.values(shard, number, device) if gradient is None else gradient
            present = _present(gradient, pieces)
            for piece, there in zip(pieces, present, strict=True):
                if not there:
                    gradient[piece.offset : piece.end].zero_()
            numbers = hyper.get(ground.plan.tensors[pieces[0].tensor].group)
            values = ground.model.whole(shard, number)
            if values is not None:
                rule.apply(values, gradient, clock=step, present=present, hyper=numbers)
                continue
            values = ground.model.values(shard, number, device)
            if rule.apply(values, gradient, clock=step, present=present, hyper=numbers):
                ground.model.load(shard, number, values)
        ground.model.settle()
        self._step = step + 1
        self._brought.clear()

    @torch.no_grad()
    def _load(self, images: Sequence[BucketImage], step: int) -> None:
        """Take a state over from the shards. Raises CheckpointError or ProtocolError if it doesn't fit."""
        ground = self.ground
        found = {(image.shard, image.bucket): image for image in images}
        if found.keys() != ground.rules.keys():
            raise ProtocolError(f"the state of step {step} has {len(found)} buckets; the plan has {len(ground.rules)}")
        self._step = None
        for key, rule in ground.rules.items():
            image = found[key]
            begun = (tuple(image.initialized) + (False,) * len(rule.site.bucket.slices))[: len(rule.site.bucket.slices)]
            rule.load(image.tensors, image.scalars, begun)
            ground.model.load(*key, image.tensors[VALUE].to(rule.site.device))
        ground.model.settle()
        self._step = step
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
        return step is not None and self._step == step + 1 and 0 in replicas

    def _bring(self) -> None:
        ground = self.ground
        for shard in sorted(self._owed):
            if ground.states.bring(shard, self.images(shard)):
                self._owed.discard(shard)
                self._brought.add(shard)

    def bring_all(self) -> None:
        """Bring the state to all shards: this worker has finished, and a cut of its last step may follow."""
        if self._ground is not None and self._ran_first:
            self._owed = set(range(len(self._ground.plan.shards))) - self._brought
            self._bring()

    def bring_last(self, step: int, wanting: Iterable[int]) -> None:
        """Bring the state of the step at which the job stops to shards that still want it, whoever ran replica 0."""
        if self._step == step:
            self._owed = set(wanting)
            self._bring()

    def images(self, shard: int) -> list[BucketImage]:
        """The state of a shard as of this worker's step."""
        assert self._step is not None
        found = []
        for (number, at), rule in self.ground.rules.items():
            if number == shard:
                states, scalars, initialized = rule.export()
                values = self.ground.model.values(number, at)
                found.append(
                    BucketImage(
                        shard=shard,
                        bucket=at,
                        step=self._step,
                        version=0,
                        tensors={VALUE: values, **states},
                        scalars=scalars,
                        initialized=initialized,
                    )
                )
        return found

    # Passes

    def enter(self, replica: int, tick: int) -> None:
        """See LocalTraining.enter. A state that is still wanted leaves before the gradient that closes its step."""
        self._show(TensorKind.BUFFER)
        if replica == 0 and tick == 0 and self._owed:
            self._bring()

    def take(self, replica: int, tick: int, outgoing: Outgoing) -> Outgoing:
        """See LocalTraining.take."""
        if self._computed[0] != self._step:
            self._computed = self._step, set()
        self._computed[1].add(replica)
        model, pulled = self._held.model, self._held.pulled
        changed = [
            spec.name
            for spec in self._held.specs
            if self._held.brings_buffers(replica)
            and spec.kind is TensorKind.BUFFER
            and not same_bits(model[spec.name], pulled[spec.name])
        ]
        return replace(outgoing, buffers={name: model[name].clone() for name in changed})


def _present(gradient: torch.Tensor, pieces: Sequence[Slice]) -> list[bool]:
    """Which slices of a bucket have a gradient: for the others the servers write NaN, which no counted one contains."""
    offsets = [piece.offset for piece in pieces if piece.elements]
    absent = iter(gradient[torch.tensor(offsets, dtype=torch.int64, device=gradient.device)].isnan().tolist())
    return [piece.elements == 0 or not next(absent) for piece in pieces]
