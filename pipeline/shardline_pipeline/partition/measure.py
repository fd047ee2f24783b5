"""Looks at the layers of a model on a real batch: what they hand on, keep and count, and how long they take."""

from __future__ import annotations

import copy
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardline.core.parcel import memory_order, only_input
from shardline.data import BatchSource, DataSource, checked_loss, derive, seed_everything, to_device
from shardline.errors import JobError, calling
from shardline_pipeline.partition.profile import Handed, Layer, Profile
from shardline_pipeline.split.model import Unit, Units


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what operations allocate for tensors, and what of it is freed. Views count nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: list[tuple[int, int]] = []
        """(number of a storage, bytes more), in order."""
        self._numbers: dict[int, int] = {}
        """By storage. A freed one's address may be another's soon."""
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What comes from elsewhere was there before.
        for storage in _storages((args, kwargs)):
            self._numbers.setdefault(storage._cdata, -1)
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in self._numbers:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, number, size = storage._cdata, len(self._made), storage.nbytes()

        def gone(_: object) -> None:
            self._numbers.pop(key, None)
            self._changes.append((number, -size))

        self._numbers[key] = number
        self._made.append(weakref.ref(storage, gone))
        self._changes.append((number, size))

    def mark(self) -> int:
        return len(self._changes)

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are what a backward pass is given."""
        self._given.update(self._numbers[storage._cdata] for storage in _storages([*tensors]))

    def most_since(self, moment: int, without: Iterable[torch.Tensor], *, given: bool) -> int:
        """The most bytes that there have been from a moment on, more than then.

        without: what does not count. given: with what was given.
        """
        left_out = {self._numbers.get(storage._cdata) for storage in _storages([*without])}
        left_out.update(() if given else self._given)
        most = now = 0
        for number, change in self._changes[moment:]:
            if number not in left_out:
                now += change
                most = max(most, now)
        return most


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for one in pytree.tree_leaves(value):
        if isinstance(one, torch.Tensor):
            yield one.untyped_storage()


REPEATS = 7
"""Passes of which the median counts, after one that does not."""
MOST_S = 20.0
"""Seconds after which a layer is measured only once more."""


def _recurrent_flops(given: Sequence[int], weights: Sequence[int], recurrent: Sequence[int], *_: Any, **__: Any) -> int:
    """Flops of one direction of a layer: its input and its state times their weights, for each step of each sample."""
    return 2 * given[0] * given[1] * (math.prod(weights) + math.prod(recurrent))


FLOPS = {torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops}
"""What FlopCounterMode leaves out: processors with oneDNN compute an LSTM in one operation, others in several."""


@dataclass
class _Look:
    entry: Any
    """What the job's loss calls the model with: a tensor, or a tuple of tensors."""
    outputs: list[Any] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)


def shapes(model: nn.Sequential, job: DataSource) -> Profile:
    """The profile without times: a function of the job alone, the same in every process.

    Computes one microbatch, layer by layer, with all that this changes: random numbers, buffers and what else layers
    keep. Raises JobError if the job's loss or a layer raises, or a layer of which gradients are wanted returns no
    tensor.
    """
    return _profile(model, job, 0)


def measure(model: nn.Sequential, job: DataSource, *, repeats: int = REPEATS) -> Profile:
    """The profile with times: medians of one microbatch on this machine, with torch's present number of threads.

    Changes and raises what shapes() does.
    """
    return _profile(model, job, repeats)


def _profile(model: nn.Sequential, job: DataSource, repeats: int) -> Profile:
    """repeats: of each pass whose median counts; 0 = without times."""
    device = next(model.parameters()).device
    with calling(f"moving a batch to {device}"):
        batch = to_device(BatchSource(job).batch(0, 0, 0), device)
    look, layers = _look(model, job, batch), []
    ends: list[Callable[[Any], torch.Tensor] | None] = [None] * (len(model) - 1)
    passes = list(zip(model, [look.entry, *look.outputs], [*ends, _entered(model, job, batch)], strict=False))
    for found, (layer, given, loss) in zip(look.layers, passes, strict=True):
        passing, between = _passing_bytes(layer, given, loss)
        layers.append(replace(found, passing_bytes=passing, between_bytes=between))
    for number, one in enumerate(passes if repeats else ()):
        forward_s, backward_s = _timed(*one, device, repeats)
        layers[number] = replace(layers[number], forward_s=forward_s, backward_s=backward_s)
    threads = torch.get_num_threads()
    return Profile(
        layers=tuple(layers),
        samples=job.batch_size,
        measured=f"{device.type}, {threads} thread{'s' if threads > 1 else ''}" if repeats else "",
        batch_bytes=sum(tensor.nbytes for tensor in tensors_in(batch)),
        joined=_joined(model),
        split=isinstance(model, Units),
    )


def name_of(number: int, layer: nn.Module) -> str:
    """A layer's name in a profile: its number, and its class or the module that it begins with."""
    return f"{number} ({layer.start if isinstance(layer, Unit) else type(layer).__name__})"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a tensor, list, tuple or dict."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)


class _Entered(BaseException):
    """Leaves the job's loss once the model's input is known. Not an Exception, so that no user's code stops it."""


def _entry(model: nn.Module, job: DataSource, batch: Any) -> Any:
    found: list[Any] = []

    def call(given: Any) -> Any:
        found.append(given)
        raise _Entered

    with calling("loss(model, batch)"), suppress(_Entered):
        job.loss(_StandIn(model, call), batch)
    if not found or not any(True for _ in tensors_in(found[0])):
        raise JobError("loss(model, batch) must call the model of a pipeline, with one tensor or a tuple of tensors")
    return found[0]


class _StandIn(nn.Module):
    def __init__(self, model: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.training = model.training
        self._call = call
        self._entry = model.entry if isinstance(model, Units) else only_input

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's output. Raises JobError for inputs that no sequence of layers takes."""
        return self._call(self._entry(inputs, named))


def _entered(model: nn.Module, job: DataSource, batch: Any) -> Callable[[Any], torch.Tensor]:
    def loss(output: Any) -> torch.Tensor:
        found = job.loss(_StandIn(model, lambda _: output), batch)
        return checked_loss(found)

    return loss


def _look(model: nn.Sequential, job: DataSource, batch: Any) -> _Look:
    seed_everything(derive(job.seed, 0, 0, 0))
    look = _Look(_entry(model, job, batch))
    storages = _Storages(model)
    counted: set[int] = set()
    values: Any = look.entry
    for number, layer in enumerate(model):
        last = number == len(model) - 1
        saved: list[torch.Tensor] = []
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter, _saving(saved):
            with calling(f"layer {name_of(number, layer)}"):
                values = layer(values)
            if last:
                _entered(model, job, batch)(values)
        # One tensor that is returned twice is handed on once.
        found = list({id(one): one for one in tensors_in(values)}.values())
        if not found and not last:
            raise JobError(f"layer {name_of(number, layer)} returned {type(values).__name__}, not a tensor")
        look.outputs.append(values)
        look.layers.append(
            Layer(
                name=name_of(number, layer),
                forward_s=0.0,
                backward_s=0.0,
                flops=int(counter.get_total_flops()),
                handed=() if last else tuple(map(_handed, found)),
                output=() if last else storages.of(found),
                saved=storages.of(saved),
                **_sizes(layer, counted),
            )
        )
    return look


class _Given(torch.autograd.Function):
    """Begins the backward pass of what comes in, with gradients that nobody else has."""

    @staticmethod
    def forward(ctx: Any, alive: Alive, *values: torch.Tensor) -> torch.Tensor:
        """alive: gets to know the gradients."""
        ctx.alive, ctx.forms = alive, [(value.shape, value.dtype, value.device) for value in values]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        found = tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)
        ctx.alive.given(found)
        return None, *found


def _passing_bytes(layer: nn.Module, given: Any, loss: Callable[[Any], torch.Tensor] | None) -> tuple[int, int]:
    """passing_bytes and between_bytes of a layer. loss: what follows the last one."""
    parameters = [*layer.parameters()]
    for one in parameters:
        one.grad = None
    inputs = _fresh(given)
    with Alive() as alive:
        ends = _ends(layer(inputs), loss)
        begun = alive.mark()
        if not ends:
            return 0, 0
        # As in a stage, what the layer has returned stays.
        _Given.apply(alive, *ends).backward()  # type: ignore[no-untyped-call]
        own = [one.grad for one in parameters if one.grad is not None]
        return alive.most_since(begun, own, given=False), alive.most_since(begun, own, given=True)


def _ends(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> list[torch.Tensor]:
    """What a backward pass begins with. loss: what follows the last layer."""
    ends = [loss(output)] if loss is not None else list(tensors_in(output))
    return [one for one in ends if one.requires_grad]


def _handed(value: torch.Tensor) -> Handed:
    return Handed(
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape[one] for one in memory_order(value)),
        needs_grad=value.requires_grad,
        weight=isinstance(value, nn.Parameter),
    )


class _Storages:
    def __init__(self, model: nn.Module) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        """So that no other storage gets the same address."""

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """(number, bytes) of each storage."""
        self._alive += tensors
        found = {}
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage.data_ptr() not in self._own and storage.nbytes():
                found[self._numbers.setdefault(storage.data_ptr(), len(self._numbers))] = storage.nbytes()
        return tuple(found.items())


@contextmanager
def _saving(saved: list[torch.Tensor]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        yield


def _sizes(layer: nn.Module, counted: set[int]) -> dict[str, int]:
    """Bytes of a layer's tensors, without those of layers before."""
    found = {"trained_bytes": 0, "largest_bytes": 0, "fixed_bytes": 0}
    for tensor in (*layer.parameters(), *layer.buffers()):
        if id(tensor) not in counted:
            counted.add(id(tensor))
            found["trained_bytes" if tensor.requires_grad else "fixed_bytes"] += tensor.nbytes
            if tensor.requires_grad:
                found["largest_bytes"] = max(found["largest_bytes"], tensor.nbytes)
    return found


def _joined(model: nn.Sequential) -> tuple[int, ...]:
    """Layers that can't begin a stage: one before and one from there on have the same tensor, and don't hand it on."""
    if isinstance(model, Units):
        return ()
    first: dict[int, int] = {}
    found: set[int] = set()
    for number, layer in enumerate(model):
        for tensor in (*layer.parameters(), *layer.buffers()):
            found.update(range(first.setdefault(id(tensor), number) + 1, number + 1))
    return tuple(sorted(found))


def _timed(
    layer: nn.Module, given: Any, loss: Callable[[Any], torch.Tensor] | None, device: torch.device, repeats: int
) -> tuple[float, float]:
    """Medians of a layer's forward and backward pass. loss: what follows the last layer."""
    forward: list[float] = []
    backward: list[float] = []
    ends_s = time.monotonic() + MOST_S
    while len(forward) <= 1 or (len(forward) <= repeats and time.monotonic() < ends_s):
        # Not a leaf, so that the layer may change it in place; of the run's own, so that its gradient is computed too.
        inputs = _fresh(given)
        begun_s = _now(device)
        output = layer(inputs)
        ends = _ends(output, loss)
        forward.append(_now(device) - begun_s)
        gradients = [torch.ones_like(one) for one in ends]
        begun_s = _now(device)
        if ends:
            torch.autograd.backward(ends, gradients)
        backward.append(_now(device) - begun_s)
    return statistics.median(forward[1:]), statistics.median(backward[1:])


def _fresh(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.detach().requires_grad_(given.requires_grad).clone()
    if isinstance(given, Mapping):
        return {name: _fresh(value) for name, value in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(_fresh(value) for value in given)
    return copy.copy(given)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
