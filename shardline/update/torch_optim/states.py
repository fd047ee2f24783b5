"""The states of torch.optim for a parameter: their names, dtypes and shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from shardline.core.spec import Argument, TensorSpec
from shardline.errors import JobError
from shardline.update.arguments import ALLOWED, optimizer_class, torch_arguments
from shardline.update.base import Shape, StateSpec
from shardline.update.torch_optim import eager


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


def state_kinds(
    optimizer: str, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
) -> Mapping[str, StateSpec]:
    """States that the optimizer may keep for parameters of this dtype on this device, by name.

    Determined by letting torch update a few zeros. Raises JobError if torch refuses the combination.
    """
    return _state_kinds(optimizer, tuple(sorted(group.items())), dtype, device)


@functools.lru_cache(maxsize=256)
def _state_kinds(
    optimizer: str, group: tuple[tuple[str, Argument], ...], dtype: torch.dtype, device: torch.device
) -> Mapping[str, StateSpec]:
    arguments = torch_arguments(optimizer, dict(group))
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
