"""The rule "torch": the job's own optimizer, a class of torch.optim, steps on each bucket.

The result has the bits of torch.optim on the uncut contiguous tensors, for every class, every dtype and any cut
(PROTOCOL 1.1), also with fused=True. For float16 and bfloat16, and with fused=True, these are the bits of one intra-op
thread: torch rounds the last few elements of a tensor, and of each thread's part of it, otherwise than the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.spec import DTYPES, Argument, RuleSpec, TensorKind, TensorSpec
from shardline.errors import JobError
from shardline.host.process import torch_threads
from shardline.update.arguments import ALLOWED, optimizer_class, torch_arguments
from shardline.update.base import BucketRule, RuleState, Shape, Site, StateSpec, Update, UpdateRule
from shardline.update.torch_optim import adam, eager
from shardline.update.torch_optim.runs import ElementwiseStates, rounds_by_position
from shardline.update.torch_optim.whole import WholeStates


def _row_var(tensor: TensorSpec) -> Shape | None:
    return (*tensor.shape[:-1], 1) if len(tensor.shape) > 1 else None


def _col_var(tensor: TensorSpec) -> Shape | None:
    return (*tensor.shape[:-2], 1, tensor.shape[-1]) if len(tensor.shape) > 1 else None


def _variance(tensor: TensorSpec) -> Shape | None:
    return None if len(tensor.shape) > 1 else tensor.shape


_PACKED: Mapping[str, Mapping[str, Callable[[TensorSpec], Shape | None]]] = {
    "Adafactor": {"row_var": _row_var, "col_var": _col_var, "variance": _variance}
}
"""States whose shape is not their tensor's, by optimizer."""


def packing(optimizer: str, state: str) -> Callable[[TensorSpec], Shape | None] | None:
    return _PACKED.get(optimizer, {}).get(state)


@functools.lru_cache(maxsize=256)
def _state_kinds(
    optimizer: str, group: tuple[tuple[str, Argument], ...], dtype: torch.dtype, device: torch.device
) -> Mapping[str, StateSpec]:
    arguments = dict(adam.placed(optimizer_class(optimizer), torch_arguments(optimizer, dict(group)), dtype, device))
    planned = True
    if optimizer == "SGD" and arguments["momentum"] == 0.0:
        # A scheduler may turn on momentum later; torch then starts the buffer at that step.
        arguments["momentum"] = 0.5
        planned = False
    shapes = [(64,)] if ALLOWED[optimizer] else [(2, 2)] if optimizer == "Muon" else [(2, 2), (2,)]
    kinds: dict[str, StateSpec] = {}
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        try:
            stepped = optimizer_class(optimizer)([parameter], **arguments)
            parameter.grad = torch.zeros_like(parameter)
            eager.step(stepped)
        except (ValueError, RuntimeError, TypeError) as error:
            raise JobError(f"{optimizer} can't update {dtype} parameters on {device}: {error}") from None
        for name, state in stepped.state[parameter].items():
            kinds[name] = StateSpec(dtype=state.dtype, device=state.device, scalar=state.dim() == 0, planned=planned)
    return kinds


@dataclass(frozen=True)
class Torch(UpdateRule):
    """The job's optimizer as torch.optim computes it."""

    name: ClassVar[str] = "torch"

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        """See UpdateRule. Checks each parameter's group, dtype, shape and cut."""
        for tensor in tensors:
            if tensor.kind is not TensorKind.PARAM:
                continue
            if not 0 <= tensor.group < len(spec.groups):
                raise JobError(
                    f"{tensor.name!r} is in parameter group {tensor.group}, but {spec.name} has {len(spec.groups)}"
                )
            _check_dtype(spec, tensor)
            if spec.name == "Muon" and len(tensor.shape) != 2:
                raise JobError(
                    f"Muon updates only matrices, but {tensor.name!r} has shape {tensor.shape}; train it with AdamW, "
                    "or freeze it"
                )
            if self.wants_whole(spec, tensor.shape) and not tensor.whole:
                raise JobError(f"{spec.name} needs whole tensors, but {tensor.name!r} is not marked as whole")

    def wants_whole(self, spec: RuleSpec, shape: Sequence[int]) -> bool:
        """See UpdateRule. A 0-d tensor has nothing to cut."""
        optimizer_class(spec.name)
        return not ALLOWED[spec.name] and len(shape) > 0

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule. Found by letting torch update a few zeros, which may refuse the combination."""
        return _state_kinds(spec.name, tuple(sorted(group.items())), dtype, device)

    def packing(self, spec: RuleSpec, state: str) -> Callable[[TensorSpec], Shape | None] | None:
        """See UpdateRule. For Adafactor's factors."""
        return packing(spec.name, state)

    def make(self, site: Site) -> BucketRule:
        return TorchBucketRule(self, site)


class TorchBucketRule(BucketRule):
    """torch.optim and its state for one bucket of parameters."""

    def __init__(self, rule: UpdateRule, site: Site) -> None:
        super().__init__(rule, site)
        cls = optimizer_class(site.spec.name)
        arguments = self._placed(torch_arguments(site.spec.name, site.group))
        self._alone = not ALLOWED[site.spec.name] or rounds_by_position(site, arguments)
        """True if one thread computes it all, since the bits depend on the number of threads."""
        self._states: ElementwiseStates | WholeStates
        if ALLOWED[site.spec.name]:
            self._states = ElementwiseStates(cls, arguments, site, self.states)
        else:
            self._states = WholeStates(cls, arguments, rule, site, self.states)

    def carry_out(self, update: Update) -> None:
        arguments = self._placed(update.arguments)
        with torch_threads(1) if self._alone else nullcontext():
            self._states.apply(update, arguments)

    def _placed(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return adam.placed(optimizer_class(self.site.spec.name), arguments, self.site.dtype, self.site.device)

    def export(self) -> RuleState:
        """See BucketRule. Element-shaped states have the bucket's layout, Adafactor's are packed."""
        states = self._states
        tensors: dict[str, Tensor] = {}
        if isinstance(states, ElementwiseStates):
            states.collect()
            for name, flat in states.flat.items():
                tensors[name] = flat.to("cpu", copy=True).index_fill_(0, states.padding.cpu(), 0)
        else:
            tensors = {name: flat.cpu() for name, flat in states.flat.items()}
        scalars = {name: tuple(numbers) for name, numbers in states.scalars.items()}
        return RuleState(tensors, scalars, tuple(states.initialized))

    def put(self, state: RuleState) -> None:
        if not any(state.initialized):
            self._states.set_state({}, {}, state.initialized)
            return
        flat = {name: tensor.detach().to(self.site.device, copy=True) for name, tensor in state.tensors.items()}
        self._states.set_state(flat, {name: [*numbers] for name, numbers in state.scalars.items()}, state.initialized)

    @property
    def nbytes(self) -> int:
        return self._states.nbytes


def _check_dtype(spec: RuleSpec, tensor: TensorSpec) -> None:
    dtype = DTYPES[tensor.dtype]
    if not (dtype.is_floating_point or dtype.is_complex):
        raise JobError(f"{tensor.name!r} has dtype {tensor.dtype}; {spec.name} updates floating-point tensors only")
    if dtype.is_complex and not ALLOWED.get(spec.name):
        raise JobError(f"{spec.name} doesn't support complex parameters, and {tensor.name!r} has dtype {tensor.dtype}")
    if dtype.is_complex and spec.groups[tensor.group].get("fused"):
        raise JobError(
            f"{spec.name} with fused=True doesn't support complex parameters; {tensor.name!r} is {tensor.dtype}"
        )
