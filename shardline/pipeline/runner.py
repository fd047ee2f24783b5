"""Computes stages of a replica: passes in the schedule's order, as soon as what they need has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardline.data import (
    Batch,
    BatchSource,
    DataSource,
    calling,
    check_loss,
    derive,
    seed_everything,
    staying,
    to_device,
)
from shardline.errors import JobError
from shardline.pipeline.base import Pass, PipelineSchedule
from shardline.pipeline.parcel import Parcel, ParcelKey


class Layers(Protocol):
    """A model in stages; see shardline.pipeline.model.Pipeline."""

    training: bool

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        ...

    def run(self, stage: int, values: torch.Tensor) -> torch.Tensor:
        """The output of one stage."""
        ...

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of all stages."""
        ...


class Parcels(Protocol):
    """Takes parcels to the stages that they are for, and keeps those that have come."""

    def send(self, parcel: Parcel) -> None:
        """Hand a parcel over; it is delivered in the background."""
        ...

    def here(self, key: ParcelKey) -> bool:
        """Whether a parcel has come."""
        ...

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """Wait until one of these has come. Raises if none will."""
        ...

    def take(self, key: ParcelKey) -> Parcel:
        """A parcel that has come; it is kept until its step is over."""
        ...


class _Taken(BaseException):
    """Leaves the job's loss once the first stage has its input. Not an Exception, so that no user's code stops it."""


class _Model:
    """What the job's loss gets as its model: it may be called once, on one tensor, and nothing else."""

    def __init__(self, training: bool, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.training = training
        self._call = call
        self._calls = 0

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        if len(inputs) != 1 or named or not isinstance(inputs[0], torch.Tensor):
            raise JobError("loss(model, batch) must call the model of a pipeline with one tensor")
        self._calls += 1
        if self._calls > 1:
            raise JobError("loss(model, batch) called the model of a pipeline twice; it may call it once per batch")
        return self._call(inputs[0])

    def __getattr__(self, name: str) -> Any:
        raise JobError(
            f"loss(model, batch) asks for model.{name}, but no worker of a pipeline has the whole model; it may only "
            "call it"
        )


@dataclass
class _Held:
    """A forward pass that waits for its backward pass."""

    inputs: torch.Tensor | None
    """What came from the stage before, with the gradient to send back; None in stage 0."""
    output: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Place:
    """What is computed: one replica's part of one step."""

    step: int
    replica: int


class StageRunner:
    """Computes some stages of a replica, one step at a time. Used by one thread.

    model: on the device to compute on. Gradients are left in the parameters' .grad, the mean over the microbatches.
    """

    def __init__(
        self, model: Layers, job: DataSource, source: BatchSource, pipeline: PipelineSchedule, parcels: Parcels
    ) -> None:
        self._model = model
        self._job = job
        self._source = source
        self._pipeline = pipeline
        self._parcels = parcels
        self._device = next(iter(model.parameters())).device
        self._last = model.num_stages - 1
        self._batches: dict[int, Batch] = {}
        """Of a worker that has both the first and the last stage: batches read for the first."""
        self._held: dict[tuple[int, int], _Held] = {}
        self._place = Place(step=0, replica=0)
        self._total = 0.0

    @property
    def samples(self) -> int:
        """Samples of a replica's part of a step."""
        return self._job.batch_size * self._job.accumulate

    def run(self, place: Place, stages: Sequence[int]) -> float | None:
        """Compute these stages; returns the mean loss if the last one is among them.

        Raises JobError if the job's loss raises, or isn't a scalar that depends on the parameters, or a stage returns
        something else than one tensor; and what Parcels.wait() raises.
        """
        self._place, self._total = place, 0.0
        self._batches.clear()
        self._held.clear()
        both = {0, self._last} <= set(stages)
        count, last = self._job.accumulate, self._last
        todo = {stage: deque(self._pipeline.passes(stage, last + 1, count)) for stage in sorted(stages, reverse=True)}
        while todo:
            # The last stages first: what they send back frees memory.
            ready = next((stage for stage, passes in todo.items() if self._ready(stage, passes[0])), None)
            if ready is None:
                self._parcels.wait([key for stage, passes in todo.items() if (key := self._needs(stage, passes[0]))])
                continue
            one = todo[ready].popleft()
            if not todo[ready]:
                del todo[ready]
            if one.back:
                self._backward(ready, one.microbatch)
            else:
                self._forward(ready, one.microbatch, keep_batch=both)
        return self._total / count if last in stages else None

    def _key(self, stage: int, microbatch: int, *, back: bool) -> ParcelKey:
        return ParcelKey(self._place.step, self._place.replica, stage, microbatch, back)

    def _needs(self, stage: int, one: Pass) -> ParcelKey | None:
        """The parcel that a pass needs."""
        if one.back:
            held = self._held[stage, one.microbatch]
            needed = stage < self._last and held.output.requires_grad
        else:
            needed = stage > 0
        return self._key(stage, one.microbatch, back=one.back) if needed else None

    def _ready(self, stage: int, one: Pass) -> bool:
        key = self._needs(stage, one)
        return key is None or self._parcels.here(key)

    def _batch(self, microbatch: int, *, keep: bool) -> Batch:
        if microbatch in self._batches:
            return self._batches.pop(microbatch)
        batch = self._source.batch(self._place.step, self._place.replica, microbatch)
        with calling(f"moving a batch to {self._device}"):
            batch = to_device(batch, self._device)
        if keep:
            self._batches[microbatch] = batch
        return batch

    def _forward(self, stage: int, microbatch: int, *, keep_batch: bool) -> None:
        inputs = None
        if stage > 0:
            parcel = self._parcels.take(self._key(stage, microbatch, back=False))
            inputs = parcel.values.to(self._device).detach().requires_grad_(parcel.needs_grad)
        ends = stage in (0, self._last)
        batch = self._batch(microbatch, keep=keep_batch and stage == 0 < self._last) if ends else None
        # After reading the batch, which uses the same generators.
        seed_everything(derive(self._job.seed, self._place.step, self._place.replica, microbatch))
        if stage > 0:
            _restore(parcel.random_state, self._device)
        output = self._output(stage, inputs, batch)
        self._held[stage, microbatch] = _Held(inputs, output)
        if stage < self._last:
            key = self._key(stage + 1, microbatch, back=False)
            state = _random_state(self._device)
            self._parcels.send(Parcel(key, output.detach(), output.requires_grad, state))
        else:
            self._total += float(output.detach())

    def _output(self, stage: int, inputs: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """A stage's output: the loss, of the last one."""
        where = f"in step {self._place.step} of replica {self._place.replica}, stage {stage},"
        if 0 < stage < self._last:
            assert inputs is not None
            with calling(f"the model, {where}"):
                return _differentiable(self._model.run(stage, inputs), stage)
        made: list[torch.Tensor] = []

        def call(given: torch.Tensor) -> torch.Tensor:
            made.append(self._model.run(stage, given if inputs is None else inputs))
            if stage < self._last:
                raise _Taken
            return made[0]

        with calling(f"loss(model, batch), {where}"):
            try:
                loss = self._job.loss(_Model(self._model.training, call), batch)  # type: ignore[arg-type]
            except _Taken:
                return _differentiable(made[0], stage)
        if not made:
            raise JobError(f"loss(model, batch) does not call the model, {where} so nothing can be trained")
        check_loss(loss)
        return loss

    def _backward(self, stage: int, microbatch: int) -> None:
        held = self._held.pop((stage, microbatch))
        where = f"backward(), in step {self._place.step} of replica {self._place.replica}, stage {stage},"
        with staying(where):
            if stage == self._last:
                (held.output / self._job.accumulate).backward()  # type: ignore[no-untyped-call]
            elif held.output.requires_grad:
                gradient = self._parcels.take(self._key(stage, microbatch, back=True)).values
                torch.autograd.backward(held.output, gradient.to(self._device))
        if held.inputs is not None and held.inputs.requires_grad:
            key = self._key(stage - 1, microbatch, back=True)
            found = held.inputs.grad
            self._parcels.send(Parcel(key, torch.zeros_like(held.inputs) if found is None else found))


def _differentiable(output: torch.Tensor, stage: int) -> torch.Tensor:
    if not output.is_floating_point():
        raise JobError(
            f"stage {stage} of the pipeline returned a tensor of {output.dtype}, which has no gradient; cut the model "
            "elsewhere"
        )
    return output


def _random_state(device: torch.device) -> bytes:
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return state.numpy().tobytes()


def _restore(state: bytes, device: torch.device) -> None:
    values = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if device.type == "cpu":
        torch.set_rng_state(values)
    else:
        torch.cuda.set_rng_state(values, device)


class AtHome:
    """Parcels between stages that one process computes."""

    def __init__(self) -> None:
        self._here: dict[ParcelKey, Parcel] = {}

    def send(self, parcel: Parcel) -> None:
        """See Parcels.send."""
        self._here[parcel.key] = parcel

    def here(self, key: ParcelKey) -> bool:
        """See Parcels.here."""
        return key in self._here

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """See Parcels.wait. Raises JobError: nobody else can send them."""
        raise JobError(f"no stage computes {keys[0]}")

    def take(self, key: ParcelKey) -> Parcel:
        """See Parcels.take."""
        return self._here.pop(key)
