"""Adam and AdamW as torch.optim computes them by default, in one pass over memory, with the result in another tensor.

torch's default runs each operation over the whole bucket: five passes and more, 6 to 8 times as long as its own fused
kernel, whose bits are others. Operations, their order and their rounding are those of torch's _single_tensor_adam, so
the bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardline.native import kernels

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def is_plain(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Whether torch would run its default loop over tensors, which step() repeats."""
    chosen = any(arguments.get(name) for name in ("fused", "foreach", "capturable", "differentiable"))
    return cls in (torch.optim.Adam, torch.optim.AdamW) and not chosen


def placed(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Mapping[str, Any]:
    """The arguments with torch's fused kernel where the values are on a GPU and nobody has chosen another.

    Torch's default there takes a kernel for each operation, with other roundings.
    """
    chosen = any(arguments.get(name) is not None for name in ("fused", "foreach"))
    held = any(arguments.get(name) for name in ("capturable", "differentiable"))
    fits = cls in (torch.optim.Adam, torch.optim.AdamW) and device.type == "cuda" and not dtype.is_complex
    return {**arguments, "fused": True} if fits and not (chosen or held) else arguments


def step(
    source: Tensor, gradient: Tensor, target: Tensor, state: dict[str, Tensor], arguments: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """Write the values after one step to `target`; returns torch's state after it, None if it is left to torch.

    source, gradient, target: flat, equal length and dtype; target may be source, nothing else may overlap. source and
    gradient are not changed. state: empty before the first step; then changed in place. arguments: torch.optim.Adam's.
    """
    if not state:
        state = {name: torch.zeros_like(source) for name in MOMENTS[: 2 + bool(arguments["amsgrad"])]}
        state = {"step": torch.tensor(0.0, dtype=torch.get_default_dtype()), **state}
    number = float(state["step"]) + 1
    if not kernels.adam_step(source, gradient, target, state, number, arguments):
        return None
    state["step"].fill_(number)
    return state
