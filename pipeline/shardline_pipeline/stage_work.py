"""Passes of a stage: one microbatch forward or backward, with the activations and gradients that come and go."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardline.core.fixed import fixed
from shardline.core.orders import PassReport
from shardline.core.parcel import Parcel, ParcelKey, pack, unpack
from shardline.core.spec import DTYPES
from shardline.data import Batch, BatchSource, DataSource, checked_loss, derive, seed_everything, to_device
from shardline.errors import JobError, JobExitError, ProtocolError, calling
from shardline_pipeline.activation_coding import ActivationCoding, is_encoded
from shardline_pipeline.replica_tensors import ReplicaTensors, Values
from shardline_pipeline.staged import StagedModel

Place = tuple[int, int, int]
"""(step, replica, microbatch)."""


class Batches:
    """Reads batches in the order in which passes ask for them.

    Replicas take turns, but data that is read in one direction can't: what is in between is read and kept then.
    """

    def __init__(self, job: DataSource, source: BatchSource, last: int, device: torch.device) -> None:
        """last: the last stage."""
        self._count = job.accumulate
        self._source = source
        self._last = last
        self._device = device
        self._stages: Mapping[int, Sequence[int]] = {}
        self._kept: dict[Place, Batch] = {}
        self._next: Place | None = None
        """Of the batches that this worker's passes need, in the order of the data: the next one to read."""

    def begin(self, stages: Mapping[int, Sequence[int]]) -> None:
        """Forget everything. stages: of this worker, by replica."""
        self._stages = {replica: own for replica, own in stages.items() if {0, self._last} & set(own)}
        self._kept.clear()
        self._next = None

    def take(self, step: int, replica: int, stage: int, microbatch: int) -> Batch:
        """The batch for a pass, on the device. If both the first and the last stage are here, it is kept for that."""
        place = (step, replica, microbatch)
        found = self._kept.pop(place) if place in self._kept else self._read(place)
        if stage == 0 < self._last and self._last in self._stages[replica]:
            self._kept[place] = found
        return found

    def _read(self, place: Place) -> Batch:
        if self._source.ordered and len(self._stages) > 1:
            at = (place[0], min(self._stages), 0) if self._next is None else self._next
            while at < place:
                self._kept[at] = self._load(at)
                at = self._after(at)
            self._next = self._after(place)
        return self._load(place)

    def _after(self, place: Place) -> Place:
        step, replica, microbatch = place
        if microbatch + 1 < self._count:
            return step, replica, microbatch + 1
        own = sorted(self._stages)
        number = own.index(replica) + 1
        return (step, own[number], 0) if number < len(own) else (step + 1, own[0], 0)

    def _load(self, place: Place) -> Batch:
        batch = self._source.batch(*place)
        with calling(f"moving a batch to {self._device}"):
            return to_device(batch, self._device)


class ActivationChannel(Protocol):
    """Takes activations and gradients to the stages that they are for, and keeps those that have come."""

    def send(self, parcel: Parcel) -> None:
        """Hand a parcel over; it is delivered in the background."""

    def here(self, key: ParcelKey) -> bool: ...

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """Wait until one of these has come. Raises if none will."""

    def take(self, key: ParcelKey) -> Parcel:
        """A parcel that has come; it is kept until its step is over."""

    def passed(self, report: PassReport) -> None: ...


class _Taken(BaseException):
    """Leaves the job's loss once the first stage has its input. Not an Exception, so that no user's code stops it."""


class _Model:
    def __init__(self, training: bool, call: Callable[..., Any]) -> None:
        self.training = training
        self._call = call
        self._calls = 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise JobError("loss(model, batch) called the model of a pipeline twice; it may call it once per batch")
        return self._call(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        raise JobError(
            f"loss(model, batch) asks for model.{name}, but no worker of a pipeline has the whole model; it may only "
            "call it"
        )


@fixed()
class _Given:
    """All that a forward pass depends on, parameters aside."""

    batch: Batch | None
    """In the first stage and the last."""
    buffers: Values = field(default_factory=dict)
    """As they were before the pass, if it is to be repeated."""
    inputs: tuple[torch.Tensor, ...] = ()
    """What came from the stage before, with the gradients to send back; none in stage 0."""
    encoded: tuple[bool, ...] = ()
    """Which inputs came encoded, so that their gradients are, too."""
    places: tuple[int, ...] = ()
    random_state: bytes = b""
    sender: str = ""
    """The worker that the inputs came from."""

    def changes(self) -> list[int]:
        """How often each tensor has been changed in place: a pass can be repeated only with what it had."""
        found = (one for one in pytree.tree_leaves((self.batch, self.inputs)) if isinstance(one, torch.Tensor))
        return [one._version for one in found]


@fixed()
class _Held:
    """A forward pass that waits for its backward pass."""

    given: _Given
    """Without the batch, unless the pass is to be repeated."""
    outputs: tuple[torch.Tensor, ...] | None
    """What went to the next stage; the loss of the last one. None: the pass is repeated."""
    needs_grad: tuple[bool, ...]
    """Which outputs have a gradient."""

    @property
    def waits(self) -> bool:
        return any(self.needs_grad)


@fixed(order=True)
class At:
    step: int
    replica: int
    stage: int
    microbatch: int

    def key(self, *, back: bool, towards: int = 0) -> ParcelKey:
        """The parcel for this stage, or for one `towards` stages later."""
        return ParcelKey(self.step, self.replica, self.stage + towards, self.microbatch, back)

    def __str__(self) -> str:
        return f"in step {self.step} of replica {self.replica}, stage {self.stage},"


class StageWork:
    """Computes passes of a worker's stages. Used by one thread.

    model: on the device to compute on. Gradients are added to those of the replica in `tensors`, each divided by the
    number of microbatches of a step.

    recompute: keep of a forward pass only what it was given, and repeat it for the backward pass, with the random
    numbers and buffers that it had. Gradients are the same. overwrites: new values come into the parameters' memory
    while passes are open.
    """

    def __init__(
        self,
        model: StagedModel,
        job: DataSource,
        source: BatchSource,
        channel: ActivationChannel,
        *,
        recompute: bool = False,
        overwrites: bool = False,
    ) -> None:
        self._model = model
        self._job = job
        self._channel = channel
        self._recompute = recompute
        self._overwrites = overwrites
        self._device = next(one.device for _, one in model.named_parameters())
        self.last = model.num_stages - 1
        """The last stage."""
        self.version = 0
        """Of the parameters in the model, for reports; whoever puts others there sets it."""
        self.tensors = ReplicaTensors(model)
        self._coding = ActivationCoding(str(job.codec_parcels), job.seed)
        self._batches = Batches(job, source, self.last, self._device)
        self._held: dict[At, _Held] = {}
        self._border = functools.cache(self._name_border)
        self._spare = torch.Generator(self._device)
        """Tries a state before torch's own generator gets it."""

    def begin(self, stages: Mapping[int, Sequence[int]]) -> None:
        """Forget forward passes whose backward passes will not come. stages: of this worker, by replica."""
        self._batches.begin(stages)
        self._held.clear()

    def needs(self, at: At, *, back: bool) -> ParcelKey | None:
        needed = at.stage < self.last and self._held[at].waits if back else at.stage > 0
        return at.key(back=back) if needed else None

    def ready(self, at: At, *, back: bool) -> bool:
        key = self.needs(at, back=back)
        return key is None or self._channel.here(key)

    def forward(self, at: At) -> float:
        """One forward pass; returns the loss of the last stage, 0.0 of others.

        Raises JobError if the job's loss raises, or isn't a scalar that depends on the parameters, or a stage returns
        something else than tensors.
        """
        start_s = time.monotonic()
        given = self._given(at)
        before = given.changes() if self._recompute else []
        try:
            outputs, places = self._outputs(at, given)
        except JobError as error:
            if not given.sender or isinstance(error, JobExitError):
                raise
            came = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in given.inputs)
            raise JobError(f"{error} (it was given {came}, which came from {given.sender})") from error
        end_s, needs_grad = time.monotonic(), tuple(one.requires_grad for one in outputs)
        if self._recompute:
            if given.changes() != before:
                raise JobError(
                    f"the model, or loss(model, batch), changes in place what it is given, {at} so this pass can't be "
                    "repeated; copy it first, or leave recompute out of the job's pipeline"
                )
            self._held[at] = _Held(given, None, needs_grad)
        else:
            self._held[at] = _Held(replace(given, batch=None), outputs, needs_grad)
        # Its end is taken before it is sent: the next stage may be quicker than this thread.
        if at.stage < self.last:
            values, state = tuple(self._sent(one) for one in outputs), _random_state(self._device)
            made = Parcel(at.key(back=False, towards=1), values, needs_grad, places, state)
            passed_on = [one for one, came in zip(given.inputs, given.encoded, strict=True) if not came]
            which = [is_encoded(one) and not any(one is other for other in passed_on) for one in outputs]
            self._channel.send(self._coding.encoded(made, which, self._border(at.stage)))
        self._passed(at, start_s, end_s, self._holds(at))
        return float(outputs[0].detach()) if at.stage == self.last else 0.0

    def _sent(self, output: torch.Tensor) -> torch.Tensor:
        """An output to be sent later: with memory of its own, if it is a weight that is handed on."""
        found = output.detach()
        return found.clone() if self._overwrites and isinstance(output, nn.Parameter) else found

    def _given(self, at: At) -> _Given:
        ends = at.stage in (0, self.last)
        parcel = self._channel.take(at.key(back=False)) if at.stage > 0 else None
        batch = self._batches.take(at.step, at.replica, at.stage, at.microbatch) if ends else None
        self.tensors.enter(at.replica, at.stage)
        buffers = self.tensors.kept(at.replica, at.stage) if self._recompute else {}
        if parcel is None:
            return _Given(batch, buffers)
        values = self._decoded(parcel, self._border(parcel.key.stage - 1))
        try:
            self._spare.set_state(torch.frombuffer(bytearray(parcel.random_state), dtype=torch.uint8))
        except (RuntimeError, TypeError, ValueError) as error:
            size = len(parcel.random_state)
            raise parcel.unusable(f"its {size} bytes are no state of {self._device}'s random generator") from error
        moved = [value.to(self._device).detach() for value in values]
        leaves = tuple(value.requires_grad_(needs) for value, needs in zip(moved, parcel.needs_grad, strict=True))
        encoded = tuple(parcel.form(number) is not None for number in range(len(leaves)))
        return _Given(batch, buffers, leaves, encoded, parcel.places, parcel.random_state, parcel.sender)

    def _outputs(self, at: At, given: _Given) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        # After reading the batch, which uses the same generators.
        seed_everything(derive(self._job.seed, at.step, at.replica, at.microbatch))

        def run(*inputs: Any, **named: Any) -> Any:
            if at.stage == 0:
                return self._model.run(at.stage, *inputs, **named)
            values = torch.frombuffer(bytearray(given.random_state), dtype=torch.uint8)
            if self._device.type == "cpu":
                torch.set_rng_state(values)
            else:
                torch.cuda.set_rng_state(values, self._device)
            return self._model.run(at.stage, unpack(given.inputs, given.places))

        output = self._output(at, run, given.batch)
        return ((output,), ()) if at.stage == self.last else pack(output, at.stage, self._model.end_of(at.stage))

    def _repeated(self, at: At, held: _Held) -> tuple[torch.Tensor, ...]:
        with self.tensors.again(at.replica, at.stage, held.given.buffers):
            outputs, _ = self._outputs(at, held.given)
        if tuple(one.requires_grad for one in outputs) != held.needs_grad:
            raise JobError(
                f"the model returns {len(outputs)} tensors, {at} where it has returned {len(held.needs_grad)}, or "
                "tensors with other gradients; have it compute the same twice, or leave recompute out of the job's "
                "pipeline"
            )
        return outputs

    def _name_border(self, stage: int, *, back: bool = False) -> str:
        """What a stage hands to the next one, or its gradient, for messages."""
        return f"the {'gradient of the ' if back else ''}output of {self._model.end_of(stage)}, stage {stage}"

    def _output(self, at: At, run: Callable[..., Any], batch: Batch) -> Any:
        stage = at.stage
        if 0 < stage < self.last:
            with calling(f"the model, {at}"):
                return run()
        made: list[Any] = []
        before = torch.is_autocast_enabled(self._device.type)

        def call(*inputs: Any, **named: Any) -> Any:
            if self.last > 1 and torch.is_autocast_enabled(self._device.type) != before:
                raise JobError(
                    f"loss(model, batch) calls the model under torch.autocast, {at} but the stages between the first "
                    "and the last are computed without the loss; use it in the forward() of layers, or make two stages"
                )
            made.append(run(*inputs, **named))
            if stage < self.last:
                raise _Taken
            return made[0]

        with calling(f"loss(model, batch), {at}"):
            try:
                loss = self._job.loss(_Model(self._model.training, call), batch)  # type: ignore[arg-type]
            except _Taken:
                return made[0]
        if not made:
            raise JobError(f"loss(model, batch) does not call the model, {at} so nothing can be trained")
        return checked_loss(loss)

    def backward(self, at: At) -> None:
        start_s, holds = time.monotonic(), self._holds(at)
        held = self._held.pop(at)
        self.tensors.enter(at.replica, at.stage)
        parcel = self._channel.take(at.key(back=True)) if held.waits and at.stage < self.last else None
        if at.stage == self.last or (parcel is not None and parcel.places):
            outputs = self._repeated(at, held) if held.outputs is None else held.outputs
            gradients = None if parcel is None else self._gradients(outputs, parcel)
            with calling(f"backward(), {at}"):
                if parcel is None:
                    (outputs[0] / self._job.accumulate).backward()  # type: ignore[no-untyped-call]
                else:
                    torch.autograd.backward([outputs[n] for n in parcel.places], gradients)
        end_s, given = time.monotonic(), held.given
        if any(value.requires_grad for value in given.inputs):
            found = {n: value.grad for n, value in enumerate(given.inputs) if value.grad is not None}
            made = Parcel(at.key(back=True, towards=-1), tuple(found.values()), places=tuple(found))
            which = [given.encoded[number] for number in found]
            self._channel.send(self._coding.encoded(made, which, self._border(at.stage - 1, back=True)))
        self._passed(at, start_s, end_s, holds, back=True)

    def _gradients(self, outputs: Sequence[torch.Tensor], parcel: Parcel) -> list[torch.Tensor]:
        """What has come back from the next stage. Raises ProtocolError, naming its worker, if it fits no output."""
        for number, place in enumerate(parcel.places):
            form, value = parcel.form(number), parcel.values[number]
            dtype, shape = (DTYPES[form.dtype], form.shape) if form is not None else (value.dtype, tuple(value.shape))
            if place >= len(outputs) or not outputs[place].requires_grad:
                raise parcel.unusable(f"there is no gradient of tensor {place} of {len(outputs)}")
            wanted = outputs[place]
            # Before anything is decoded: what that takes is then known, too.
            if (dtype, shape) != (wanted.dtype, tuple(wanted.shape)):
                raise parcel.unusable(f"it is {dtype} {shape}, of an output of {wanted.dtype} {tuple(wanted.shape)}")
        found = self._decoded(parcel, self._border(parcel.key.stage, back=True))
        return [gradient.to(self._device) for gradient in found]

    def _decoded(self, parcel: Parcel, what: str) -> tuple[torch.Tensor, ...]:
        try:
            return self._coding.decoded(parcel, what)
        except ProtocolError as error:
            raise parcel.unusable(error) from error

    def _holds(self, at: At) -> int:
        return sum(one.stage == at.stage and one.replica == at.replica for one in self._held)

    def _passed(self, at: At, start_s: float, end_s: float, held: int, *, back: bool = False) -> None:
        self._channel.passed(
            PassReport(
                step=at.step,
                replica=at.replica,
                stage=at.stage,
                microbatch=at.microbatch,
                back=back,
                start_s=start_s,
                end_s=end_s,
                version=self.version,
                held=held,
            )
        )


def _random_state(device: torch.device) -> bytes:
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return ctypes.string_at(state.data_ptr(), state.numel())
