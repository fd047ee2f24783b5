"""How the states of a rule lie in flat tensors, and what torch.optim keeps for a parameter.

Two layouts. `bucket`: an element-shaped state (exp_avg) lies as the values do, padding included. `packed`: a state of
another shape (Adafactor's row_var, col_var and variance) lies slice after slice without padding; slices of tensors that
have no such state take no room. Whoever cuts or joins states by tensor name uses state_spans() and needs no more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardline.core.plan import BucketSpec
from shardline.core.spec import Argument, TensorSpec
from shardline.errors import JobError
from shardline.update.rules import is_elementwise, optimizer_class, torch_arguments

PACKED: Mapping[str, tuple[str, ...]] = {"Adafactor": ("row_var", "col_var", "variance")}
"""States by rule that are not shaped like their tensor."""


@dataclass(frozen=True)
class StateKind:
    """What torch keeps under one name: a flat tensor per bucket, or a number per slice."""

    scalar: bool
    dtype: torch.dtype
    device: torch.device


def state_shape(rule_name: str, state_name: str, tensor: TensorSpec) -> tuple[int, ...] | None:
    """Shape of one tensor's state; None where the tensor has no such state."""
    if state_name not in PACKED.get(rule_name, ()):
        return tensor.shape
    factored = len(tensor.shape) > 1
    if state_name == "variance":
        return None if factored else tensor.shape
    if not factored:
        return None
    if state_name == "row_var":
        return (*tensor.shape[:-1], 1)
    return (*tensor.shape[:-2], 1, tensor.shape[-1])


def state_elements(rule_name: str, state_name: str, tensor: TensorSpec) -> int:
    """Elements of one tensor's state: the tensor's own count, but for the packed states. 0 where it has none."""
    shape = state_shape(rule_name, state_name, tensor)
    if shape is None:
        return 0
    count = 1
    for size in shape:
        count *= size
    return count


def state_spans(
    rule_name: str, state_name: str, bucket: BucketSpec, tensors: Sequence[TensorSpec]
) -> tuple[tuple[int, int], ...]:
    """(offset, elements) of each slice of the bucket in the flat state; the name "value" gives the values' own."""
    if state_name not in PACKED.get(rule_name, ()):
        return tuple((piece.offset, piece.elements) for piece in bucket.slices)
    spans, offset = [], 0
    for piece in bucket.slices:
        elements = state_elements(rule_name, state_name, tensors[piece.tensor])
        spans.append((offset, elements))
        offset += elements
    return tuple(spans)


def flat_elements(rule_name: str, state_name: str, bucket: BucketSpec, tensors: Sequence[TensorSpec]) -> int:
    """Length of the flat state of a bucket."""
    if state_name not in PACKED.get(rule_name, ()):
        return bucket.elements
    return sum(state_elements(rule_name, state_name, tensors[piece.tensor]) for piece in bucket.slices)


def state_kinds(
    rule_name: str, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
) -> Mapping[str, StateKind]:
    """States that the rule may keep for parameters of this dtype on this device, by name.

    Found by letting torch update a few zeros. Raises JobError where torch refuses the combination.
    """
    return _state_kinds(rule_name, tuple(sorted(group.items())), dtype, device)


@functools.lru_cache(maxsize=256)
def _state_kinds(
    rule_name: str, group: tuple[tuple[str, Argument], ...], dtype: torch.dtype, device: torch.device
) -> Mapping[str, StateKind]:
    arguments = torch_arguments(rule_name, dict(group))
    if rule_name == "SGD" and arguments["momentum"] == 0.0:
        # A user's scheduler may switch momentum on later; torch then starts the buffer at that step.
        arguments["momentum"] = 0.5
    shapes = [(64,)] if is_elementwise(rule_name) else [(2, 2)] if rule_name == "Muon" else [(2, 2), (2,)]
    kinds: dict[str, StateKind] = {}
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        try:
            optimizer = optimizer_class(rule_name)([parameter], **arguments)
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        except (ValueError, RuntimeError, TypeError) as error:
            raise JobError(f"{rule_name} can't update {dtype} parameters on {device}: {error}") from None
        for name, state in optimizer.state[parameter].items():
            kinds[name] = StateKind(scalar=state.dim() == 0, dtype=state.dtype, device=state.device)
    return kinds
