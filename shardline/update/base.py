"""The interface of update rules: the choice, what it declares, and the object that updates one bucket.

An `UpdateRule` is a choice from the table shardline.update.RULES, such as "torch" or "dc-asgd:strength=2". It declares
its needs and states, and makes one `BucketRule` per bucket, which does the arithmetic and keeps the state. A rule in
its own file only has to be added to the table; shardline.update.elementwise has what most of them share. Pure: no
messages, threads or sockets.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardline import schedule as schedules
from shardline.core.image import VALUE
from shardline.core.plan import BucketSpec
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.spec import DTYPES, Argument, RuleSpec, ScheduleSpec, TensorKind, TensorSpec
from shardline.errors import CheckpointError, JobError, ProtocolError
from shardline.seams import Resident
from shardline.update.arguments import torch_arguments, with_hyper

Shape = tuple[int, ...]


class Need(enum.Enum):
    """What a rule needs besides the gradient, or instead of it; a job that doesn't provide it is refused."""

    WORKER = "to know which worker pushed"
    LAG = "to know by how many updates a push is behind"
    PULLS = "to know what was sent to each worker"
    AHEAD = "to answer pulls with values ahead of the parameters"
    """See UpdateRule.looks_ahead."""
    MOMENTUM = "the workers' momentum"
    """Workers keep the momentum, and push it; see Codec.server_rule."""


@runtime_checkable
class Weighing(Protocol):
    """A rule whose need of a lag is a factor for the push, so that it can update from a sum of several pushes."""

    def share(self, spec: RuleSpec, staleness: int) -> float | None:
        """The factor; None with an optimizer whose step is not in proportion to the gradient."""


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """One state of a rule: a flat tensor per bucket, or a number per slice (`scalar`)."""

    dtype: torch.dtype
    device: torch.device
    scalar: bool = False
    per_worker: bool = False
    """Kept per worker that has pushed or pulled, under state_key(name, worker)."""
    planned: bool = True
    """False for a state that exists only if a later push needs it; it is left out of the memory sum."""


class RuleState(NamedTuple):
    """A bucket rule's state as a value; see BucketImage for its layout.

    tensors: flat CPU tensors by key, padding zero; a key exists once some slice has such a state. scalars: numbers by
    key, one per slice. initialized: per slice, whether it has state.
    """

    tensors: dict[str, Tensor]
    scalars: dict[str, tuple[float, ...]]
    initialized: tuple[bool, ...]


def state_key(name: str, worker: str = "") -> str:
    """Name of a state in images and checkpoints: "momentum", or "momentum@worker.3" for "worker/3"."""
    return f"{name}@{worker.replace('/', '.')}" if worker else name


def parse_state_key(key: str) -> tuple[str, str]:
    """(name, worker) of a state_key(); the worker is "" for a shared state."""
    name, _, worker = key.partition("@")
    return name, worker.replace(".", "/")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The context of one bucket's rule. tensors: the plan's; the bucket's slices refer to them by number."""

    spec: RuleSpec
    schedule: ScheduleSpec
    bucket: BucketSpec
    tensors: Sequence[TensorSpec]
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values and gradients."""
        return DTYPES[self.bucket.dtype]

    @property
    def group(self) -> Mapping[str, Argument]:
        """Arguments of the parameter group of all slices."""
        return self.spec.groups[self.tensors[self.bucket.slices[0].tensor].group]


@dataclass(frozen=True)
class UpdateRule(Resident, ABC):
    """Base of the residents of shardline.update.RULES: which rule, with its settings.

    `spec` in the methods below is the job's part: an optimizer of torch by name and its parameter groups.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What the rule needs besides the gradient. A class variable where it doesn't depend on the settings."""
        return frozenset()

    @property
    def looks_ahead(self) -> bool:
        """Whether a worker's pull gets BucketRule.answer() instead of the parameters. May be a class variable too."""
        return False

    def check(self, spec: RuleSpec) -> None:
        """Raise JobError for an optimizer or arguments that the rule can't work with. spec is canonical."""

    @abstractmethod
    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        """Raise JobError naming a parameter that the rule can't update; frozen tensors and buffers are ignored."""

    def wants_whole(self, spec: RuleSpec, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape must not be cut: TensorSpec.whole. False: the rule is element-wise."""
        return False

    @abstractmethod
    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """All states that may be kept for parameters of this group and dtype, by name.

        A name contains no "/" and no "@". Raises JobError for a combination that can't be updated.
        """

    def packing(self, spec: RuleSpec, state: str) -> Callable[[TensorSpec], Shape | None] | None:
        """Function from a tensor to its state's shape if that isn't the tensor's; None = same layout as values.

        The function returns None for a tensor without such a state. Packed states are stored slice after slice without
        padding, and tensors that have them must not be cut.
        """
        return None

    @abstractmethod
    def make(self, site: Site) -> BucketRule:
        """The rule's working object for one bucket. Raises JobError for a dtype or device that it can't work with."""

    # Layout of states in checkpoints and images

    def state_shape(self, spec: RuleSpec, key: str, tensor: TensorSpec) -> Shape | None:
        """Shape of one tensor's state; None if the tensor has no such state."""
        packed = self.packing(spec, parse_state_key(key)[0])
        return tensor.shape if packed is None else packed(tensor)

    def state_spans(
        self, spec: RuleSpec, key: str, bucket: BucketSpec, tensors: Sequence[TensorSpec]
    ) -> tuple[tuple[int, int], ...]:
        """(offset, elements) of each slice of the bucket in the flat state; key "value": the values' own."""
        packed = self.packing(spec, parse_state_key(key)[0])
        if packed is None:
            return tuple((piece.offset, piece.elements) for piece in bucket.slices)
        spans, offset = [], 0
        for piece in bucket.slices:
            shape = packed(tensors[piece.tensor])
            elements = 0 if shape is None else math.prod(shape)
            spans.append((offset, elements))
            offset += elements
        return tuple(spans)

    def flat_elements(self, spec: RuleSpec, key: str, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> int:
        """Number of elements of a bucket's flat state."""
        if self.packing(spec, parse_state_key(key)[0]) is None:
            return bucket.elements
        return sum(elements for _, elements in self.state_spans(spec, key, bucket, tensors))

    def state_bytes(self, site: Site, *, workers: int) -> int:
        """Bytes of all planned tensors of a bucket once every slice has had a gradient of each of `workers`."""
        states = self.states(site.spec, site.group, site.dtype, site.device)
        return sum(
            self.flat_elements(site.spec, name, site.bucket, site.tensors)
            * state.dtype.itemsize
            * (workers if state.per_worker else 1)
            for name, state in states.items()
            if state.planned and not state.scalar
        )


@dataclass(slots=True)
class Update:
    """One checked update of a bucket, from BucketRule.apply()."""

    values: Tensor
    gradient: Tensor
    source: Tensor | None
    present: tuple[bool, ...] | None
    """Per slice; None = all."""
    arguments: Mapping[str, Any]
    """The group's arguments with torch's names and the learning rate of this update."""
    context: PushContext


class BucketRule(ABC):
    """A rule and its state for one bucket of parameters. Used by one thread at a time; buckets are independent."""

    def __init__(self, rule: UpdateRule, site: Site) -> None:
        self.rule = rule
        self.site = site
        self._group, self._dtype, self._shape = site.group, site.dtype, (site.bucket.elements,)
        self._scheduled: float | None = None
        """The schedule's factor for which `_arguments` are those of the group."""
        self._arguments: dict[str, Any] = {}
        self.label = site.spec.label
        schedules.check(site.schedule)
        schedules.factor(site.schedule, site.schedule.warmup_steps)  # refuses one that has no end yet, before any step
        held = [site.tensors[piece.tensor] for piece in site.bucket.slices]
        _check_bucket(rule, self.label, site, held)
        rule.check_tensors(site.spec, held)
        self.states = rule.states(site.spec, site.group, site.dtype, site.device)

    def apply(
        self,
        values: Tensor,
        gradient: Tensor,
        *,
        clock: int,
        source: Tensor | None = None,
        present: Sequence[bool] | None = None,
        hyper: Mapping[str, float] | None = None,
        context: PushContext = TOGETHER,
    ) -> bool:
        """Update the flat values; returns whether any slice had a gradient. If none had, nothing is written.

        values, gradient: flat, the bucket's elements and dtype, on its device. The gradient is averaged and clipped,
        and is not changed; its padding must be finite. No reference to a tensor is kept.
        source: the values before the update, same shape, not changed; `values` is overwritten then, whatever it
        contains. None = in place.
        clock: step or version (updates applied before) for the schedule.
        present: per slice, whether it has a gradient; None = all. The others keep values and state, as in torch.
        hyper: numbers of the bucket's group for this call only, with the names of hyper_numbers(); if it contains "lr"
        the schedule isn't applied. context: the pusher and its base version.
        Raises ProtocolError for a wrong length, dtype or hyper; nothing is changed then.
        """
        self.check_flat(values=values, gradient=gradient, source=source)
        pattern, arguments = self.pattern(present), self.arguments(clock, hyper)
        if pattern is not None and not any(pattern):
            return False
        self.carry_out(Update(values, gradient, source, pattern, arguments, context))
        return True

    @abstractmethod
    def carry_out(self, update: Update) -> None:
        """Do an update that apply() has checked; some slice has a gradient."""

    @abstractmethod
    def export(self) -> RuleState:
        """A copy of the state."""

    def load(
        self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> None:
        """Replace the state by an exported one, bit-exactly; tensors are copied, and VALUE among them is ignored.

        An empty `initialized` means no state at all. Raises CheckpointError for an unknown or missing state, or a wrong
        length, dtype or number; the state is unchanged then.
        """
        self.put(self.checked(tensors, scalars, initialized))

    @abstractmethod
    def put(self, state: RuleState) -> None:
        """Replace the state by a checked one; its tensors are the caller's, so they are copied."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of state currently on the device, without the numbers per slice."""

    def full_nbytes(self, workers: int = 1) -> int:
        """Bytes of state once every slice has had a gradient of each worker; for the memory sum at startup."""
        return self.rule.state_bytes(self.site, workers=workers)

    def check_hyper(self, hyper: Mapping[str, float]) -> None:
        """Raise ProtocolError if apply() would refuse these numbers."""
        with_hyper(self.site.spec.name, self.site.group, hyper)

    # Workers. Call these with the bucket's lock held; a standby gets the same calls in the same order.

    @property
    def workers(self) -> frozenset[str]:
        """Workers with state of their own."""
        return frozenset()

    def members_changed(self, workers: Collection[str]) -> None:
        """Set the workers that may push from now on, and forget the state of all others."""
        for worker in sorted(self.workers - set(workers)):
            self.left(worker)

    def left(self, worker: str) -> None:  # noqa: B027
        """Forget the state of a worker that will not push any more. Unknown workers are ignored."""

    def answer(self, values: Tensor, worker: str) -> Tensor:
        """Values for a worker's pull: `values` itself, or a new tensor of the same shape if the rule looks ahead."""
        return values

    def sent(self, worker: str, values: Tensor) -> None:  # noqa: B027
        """Note the answer() sent to a worker, as encoded; called only if the rule needs Need.PULLS."""

    # For residents

    def arguments(self, clock: int, hyper: Mapping[str, float] | None = None) -> dict[str, Any]:
        """The group's arguments for one push, as torch names them: numbers replaced by `hyper`, rate scheduled.

        Not to be changed: the next push may get the same ones.
        """
        spec, group = self.site.spec, self._group
        factor = 1.0 if hyper and "lr" in hyper else schedules.factor(self.site.schedule, clock)
        if not hyper and factor == self._scheduled:
            return self._arguments
        found = with_hyper(spec.name, group, hyper) if hyper else dict(group)
        if not hyper or "lr" not in hyper:
            found["lr"] = group["lr"] * factor  # type: ignore[operator]
        arguments = torch_arguments(spec.name, found)
        if not hyper:
            self._scheduled, self._arguments = factor, arguments
        return arguments

    def check_flat(self, **given: Tensor | None) -> None:
        """Raise ProtocolError, naming the keyword, for a tensor without the bucket's length and dtype."""
        bucket, shape, dtype = self.site.bucket, self._shape, self._dtype
        for what, tensor in given.items():
            if tensor is not None and (tensor.shape != shape or tensor.dtype is not dtype):
                raise ProtocolError(
                    f"{what} of a bucket are {tuple(tensor.shape)} {tensor.dtype}; the plan says ({bucket.elements},) "
                    f"{bucket.dtype}"
                )

    def pattern(self, present: Sequence[bool] | None) -> tuple[bool, ...] | None:
        """`present` normalized: None if all are. Raises ProtocolError for a wrong length."""
        count = len(self.site.bucket.slices)
        if present is None:
            return None
        if len(present) != count:
            raise ProtocolError(f"present has {len(present)} bits for a bucket of {count} slices")
        return None if all(present) else tuple(bool(bit) for bit in present)

    def checked(
        self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> RuleState:
        """A state without the values of the parameters, and with a flag for each slice.

        Raises CheckpointError for a state that is not declared: unknown key, wrong length, dtype or number.
        """
        what = f"state of a bucket under {self.label}"
        count = len(self.site.bucket.slices)
        tensors = {key: tensor for key, tensor in tensors.items() if key != VALUE}
        initialized = list(initialized) or [False] * count
        if len(initialized) != count:
            raise CheckpointError(f"{what}: {len(initialized)} initialized flags for {count} slices")
        for key in (*tensors, *scalars):
            name, worker = parse_state_key(key)
            state = self.states.get(name)
            if state is None or state.scalar != (key in scalars) or state.per_worker != bool(worker):
                raise CheckpointError(f"{what}: unknown state {key!r}; it keeps {', '.join(self.states) or 'none'}")
        for key, tensor in tensors.items():
            length, dtype = self.length_of(key), self.states[parse_state_key(key)[0]].dtype
            if tensor.shape != (length,) or tensor.dtype != dtype:
                raise CheckpointError(
                    f"{what}: {key!r} is {tuple(tensor.shape)} {tensor.dtype}; expected ({length},) {dtype}"
                )
        for key, numbers in scalars.items():
            if len(numbers) != count:
                raise CheckpointError(f"{what}: {key!r} has {len(numbers)} numbers for {count} slices")
            if any(math.isnan(number) for number in numbers):
                raise CheckpointError(f"{what}: {key!r} has a NaN among its numbers")
        if any(initialized):
            for name, state in self.states.items():
                there = name in (scalars if state.scalar else tensors)
                if not there and not state.per_worker and (state.scalar or self.length_of(name)):
                    raise CheckpointError(f"{what}: {name!r} is missing")
        numbers_of = {key: tuple(float(number) for number in numbers) for key, numbers in scalars.items()}
        return RuleState(tensors, numbers_of, tuple(initialized))

    def length_of(self, key: str) -> int:
        """Number of elements of this bucket's flat state."""
        return self.rule.flat_elements(self.site.spec, key, self.site.bucket, self.site.tensors)


def padding_positions(bucket: BucketSpec, device: torch.device) -> Tensor:
    """Positions of the padding between the slices and after the last, int64, ascending.

    Computed from the gaps alone: a mask over all elements would take a quarter of the memory of float32 values for a
    moment, and over many buckets fragment the heap.
    """
    begins = torch.tensor([piece.end for piece in bucket.slices])
    ends = torch.tensor([*(piece.offset for piece in bucket.slices[1:]), bucket.elements])
    lengths = ends - begins
    # Each gap's start minus the number of earlier padding positions, repeated for the gap's length.
    first = (begins - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return (first + torch.arange(len(first))).to(device)


def _check_bucket(rule: UpdateRule, label: str, site: Site, held: Sequence[TensorSpec]) -> None:
    bucket = site.bucket
    if bucket.kind is not TensorKind.PARAM or not held:
        raise JobError(f"a bucket of {len(held)} {bucket.kind.value} tensors has no update rule")
    for piece, tensor in zip(bucket.slices, held, strict=True):
        if tensor.group != held[0].group:
            raise ProtocolError(
                f"a bucket mixes parameter groups: {held[0].name!r} is in {held[0].group}, {tensor.name!r} in "
                f"{tensor.group}"
            )
        if piece.rows != tensor.rows and rule.wants_whole(site.spec, tensor.shape):
            raise ProtocolError(
                f"{label} needs whole tensors, but the plan cuts {tensor.name!r}: {piece.rows} of {tensor.rows} rows"
            )
