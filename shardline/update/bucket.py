"""What an admitted gradient does to one flat bucket: torch.optim's own arithmetic, slice by slice or all at once.

With torch's default arithmetic the result has the bits of torch.optim on the uncut tensors, for every rule and any cut
(PROTOCOL 1.1). With fused=True it has equal bits for any cut, and differs from the uncut tensors' fused result only in
the last few elements of a tensor, which torch computes by another path. The same holds for float16 and bfloat16 under
SGD, ASGD and Adadelta: torch's x.add_(y, alpha=a) rounds those elements otherwise, and torch's own cut for several
intra-op threads moves them, so equal bits there also need one intra-op thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardline import schedule as schedules
from shardline.core.image import VALUE
from shardline.core.plan import BucketSpec
from shardline.core.spec import DTYPES, RuleSpec, ScheduleSpec, TensorKind, TensorSpec
from shardline.errors import CheckpointError, JobError, ProtocolError
from shardline.update import rules
from shardline.update.elementwise import ElementwiseStates
from shardline.update.layout import flat_elements, state_kinds
from shardline.update.rules import check_tensors, is_elementwise, optimizer_class, torch_arguments, with_hyper
from shardline.update.whole import WholeStates


class BucketRule:
    """The rule and its state for one bucket of parameters. Used by one thread at a time; buckets are independent.

    rule: made by shardline.update.rule() or not; it is checked and completed here.
    tensors: the plan's, which the bucket's slices number.
    Raises JobError for a rule, schedule, dtype, shape or device that can't work, naming it.
    """

    def __init__(
        self,
        rule: RuleSpec,
        schedule: ScheduleSpec,
        bucket: BucketSpec,
        tensors: Sequence[TensorSpec],
        device: torch.device,
    ) -> None:
        self._rule = rules.rule(rule.name, rule.groups)
        self._name = rule.name
        self._schedule = schedules.check(schedule)
        schedules.factor(schedule, schedule.warmup_steps)  # refuses one that has no end yet, before any step
        self._bucket = bucket
        self._tensors = tensors
        held = [tensors[piece.tensor] for piece in bucket.slices]
        _check_bucket(self._name, bucket, held)
        check_tensors(self._rule, held)
        self._group = self._rule.groups[held[0].group]
        self._kinds = state_kinds(self._name, self._group, DTYPES[bucket.dtype], device)
        self._device = device
        cls = optimizer_class(self._name)
        arguments = torch_arguments(self._name, self._group)
        self._states: ElementwiseStates | WholeStates
        if is_elementwise(self._name):
            self._states = ElementwiseStates(cls, arguments, bucket, self._kinds, device)
        else:
            self._states = WholeStates(cls, arguments, bucket, tensors, self._kinds, device)

    def apply(
        self,
        values: Tensor,
        gradient: Tensor,
        *,
        clock: int,
        source: Tensor | None = None,
        present: Sequence[bool] | None = None,
        hyper: Mapping[str, float] | None = None,
    ) -> bool:
        """Update the flat values; returns whether any slice had a gradient. Where none had, nothing is written.

        values, gradient: flat, the bucket's elements and dtype, on its device. The gradient is averaged and clipped,
        and stays as it is; its padding must be finite. No reference to a tensor is kept.
        source: the values before the update, like them, left as they are; `values` is overwritten then, whatever it
        holds. None = in place.
        clock: step (sync) or version (async) that the schedule goes by.
        present: per slice, whether it has a gradient; None = all. The others keep values and state, as in torch.
        hyper: numbers of the bucket's group for this call only, by hyper_numbers()' names; with "lr" among them the
        schedule isn't applied.
        Raises ProtocolError for a wrong length, dtype or hyper; nothing is changed then.
        """
        given = [("values", values), ("gradient", gradient)] + ([] if source is None else [("source", source)])
        for what, tensor in given:
            if tensor.shape != (self._bucket.elements,) or tensor.dtype != DTYPES[self._bucket.dtype]:
                raise ProtocolError(
                    f"{what} of a bucket are {tuple(tensor.shape)} {tensor.dtype}; the plan has "
                    f"({self._bucket.elements},) {self._bucket.dtype}"
                )
        pattern = self._pattern(present)
        group = with_hyper(self._name, self._group, hyper) if hyper else dict(self._group)
        if not hyper or "lr" not in hyper:
            group["lr"] = self._group["lr"] * schedules.factor(self._schedule, clock)  # type: ignore[operator]
        if pattern is not None and not any(pattern):
            return False
        self._states.apply(values, gradient, pattern, torch_arguments(self._name, group), source)
        return True

    def check_hyper(self, hyper: Mapping[str, float]) -> None:
        """Raise ProtocolError where apply() would refuse these numbers."""
        with_hyper(self._name, self._group, hyper)

    def export(self) -> tuple[dict[str, Tensor], dict[str, tuple[float, ...]], tuple[bool, ...]]:
        """The state as in BucketImage: (flat CPU tensors by name, per-slice numbers by name, initialized per slice).

        Copies, with zeros as padding. Element-shaped states lie in the bucket's layout, Adafactor's packed: see
        shardline.update.layout.state_spans(). Names appear once some slice has such a state.
        """
        states = self._states
        tensors: dict[str, Tensor] = {}
        if isinstance(states, ElementwiseStates):
            states.collect()
            for name, flat in states.flat.items():
                tensors[name] = flat.to("cpu", copy=True).index_fill_(0, states.padding.cpu(), 0)
        else:
            tensors = {name: flat.cpu() for name, flat in states.flat.items()}
        scalars = {name: tuple(numbers) for name, numbers in states.scalars.items()}
        return tensors, scalars, tuple(states.initialized)

    def load(
        self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> None:
        """Replace the state by an exported one, exact to the bit; tensors are copied, and VALUE among them is ignored.

        An empty `initialized` means no state at all. Raises CheckpointError for an unknown or missing state, or a wrong
        length, dtype or number; the state is unchanged then.
        """
        count = len(self._bucket.slices)
        begun = list(initialized) or [False] * count
        given = {name: tensor for name, tensor in tensors.items() if name != VALUE}
        self._check_state(given, scalars, begun)
        if not any(begun):
            self._states.set_state({}, {}, begun)
            return
        flat = {name: tensor.detach().to(self._device, copy=True) for name, tensor in given.items()}
        self._states.set_state(flat, {name: [float(n) for n in numbers] for name, numbers in scalars.items()}, begun)

    @property
    def nbytes(self) -> int:
        """Bytes of state held on the device now."""
        return self._states.nbytes

    @property
    def full_nbytes(self) -> int:
        """Bytes of state held once every slice has had a gradient; for the memory sum at start."""
        total = 0
        for name, kind in self._kinds.items():
            if not kind.scalar and not (self._name == "SGD" and self._group["momentum"] == 0.0):
                total += flat_elements(self._name, name, self._bucket, self._tensors) * kind.dtype.itemsize
        return total

    def _pattern(self, present: Sequence[bool] | None) -> tuple[bool, ...] | None:
        if present is None:
            return None
        if len(present) != len(self._bucket.slices):
            raise ProtocolError(f"present has {len(present)} bits for a bucket of {len(self._bucket.slices)} slices")
        return None if all(present) else tuple(bool(bit) for bit in present)

    def _check_state(
        self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> None:
        what = f"state of a bucket under {self._name}"
        count = len(self._bucket.slices)
        if len(initialized) != count:
            raise CheckpointError(f"{what}: {len(initialized)} initialized flags for {count} slices")
        for name in (*tensors, *scalars):
            kind = self._kinds.get(name)
            if kind is None or kind.scalar != (name in scalars):
                raise CheckpointError(f"{what}: unknown state {name!r}; it keeps {', '.join(self._kinds) or 'none'}")
        for name, tensor in tensors.items():
            length = flat_elements(self._name, name, self._bucket, self._tensors)
            if tensor.shape != (length,) or tensor.dtype != self._kinds[name].dtype:
                raise CheckpointError(
                    f"{what}: {name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected ({length},) "
                    f"{self._kinds[name].dtype}"
                )
        for name, numbers in scalars.items():
            if len(numbers) != count:
                raise CheckpointError(f"{what}: {name!r} has {len(numbers)} numbers for {count} slices")
            if any(math.isnan(number) for number in numbers):
                raise CheckpointError(f"{what}: {name!r} has a NaN among its numbers")
        if any(initialized):
            for name, kind in self._kinds.items():
                if name not in (scalars if kind.scalar else tensors) and (
                    kind.scalar or flat_elements(self._name, name, self._bucket, self._tensors)
                ):
                    raise CheckpointError(f"{what}: {name!r} is missing")


def _check_bucket(name: str, bucket: BucketSpec, held: Sequence[TensorSpec]) -> None:
    if bucket.kind is not TensorKind.PARAM or not held:
        raise JobError(f"a bucket of {len(held)} {bucket.kind.value} tensors has no update rule")
    for piece, tensor in zip(bucket.slices, held, strict=True):
        if tensor.group != held[0].group:
            raise ProtocolError(
                f"a bucket mixes parameter groups: {held[0].name!r} is in {held[0].group}, {tensor.name!r} in "
                f"{tensor.group}"
            )
        if not is_elementwise(name) and piece.rows != tensor.rows:
            raise ProtocolError(
                f"{name} needs whole tensors, but the plan cuts {tensor.name!r}: {piece.rows} of {tensor.rows} rows"
            )
