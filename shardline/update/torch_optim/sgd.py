"""SGD as torch.optim computes it by default, but with the result in another tensor than the values.

torch.optim changes parameters in place, so a bucket whose previous step must stay readable would have to be copied
first: a pass over memory as expensive as the update itself. Operations, their order and their rounding are those of
torch's _single_tensor_sgd, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardline.native import kernels


def is_plain(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Whether torch would run its default loop over tensors, which step() repeats."""
    return cls is torch.optim.SGD and not arguments.get("fused") and not arguments.get("foreach")


def step(
    source: Tensor, gradient: Tensor, target: Tensor, momentum_buffer: Tensor | None, arguments: Mapping[str, Any]
) -> Tensor | None:
    """Write the values after one step to `target`; returns the momentum buffer, a new one if there was none.

    source, gradient, target: flat, equal length and dtype; target may be source, nothing else may overlap. source and
    gradient are not changed. momentum_buffer is changed in place. arguments: torch.optim.SGD's.
    """
    momentum, decay = arguments["momentum"], arguments["weight_decay"]
    first = momentum != 0 and momentum_buffer is None
    kept = (torch.empty_like(gradient) if first else momentum_buffer) if momentum != 0 else None
    if kernels.sgd_step(source, gradient, target, kept, arguments, first=first):
        return momentum_buffer if kept is None else kept
    # Until it gets the result, the target serves for torch's temporaries.
    scratch = target if target is not source else None
    if arguments["maximize"]:
        gradient = torch.neg(gradient, out=scratch)
    if decay != 0:
        gradient = torch.add(gradient, source, alpha=decay, out=scratch)
    if momentum != 0:
        if momentum_buffer is None:
            momentum_buffer = gradient.clone()
        else:
            momentum_buffer.mul_(momentum).add_(gradient, alpha=1 - arguments["dampening"])
        if arguments["nesterov"]:
            gradient = torch.add(gradient, momentum_buffer, alpha=momentum, out=scratch)
        else:
            gradient = momentum_buffer
    torch.add(source, gradient, alpha=-arguments["lr"], out=target)
    return momentum_buffer
