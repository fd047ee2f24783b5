"""torch.optim without torch.compile, which Shardline's own processes don't use.

torch imports its compiler, `torch._dynamo`, when a process makes its first optimizer or takes the first step, to keep
these calls out of compiled graphs. That takes 2 s of one core in each process.
"""

from __future__ import annotations

import inspect
import sys

import torch

COMPILER = "torch._dynamo"
_CACHE = "__dynamo_disable"
"""Where torch keeps the function to call in place of one that its compiler must not see."""


def leave_compiler_out() -> None:
    """Make, load and save optimizers without importing torch's compiler. Call it before the first optimizer is made.

    Does nothing where the compiler is loaded already. Where torch keeps these functions in another way than torch 2.x,
    the compiler is imported as before.
    """
    if COMPILER in sys.modules:
        return
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None and not hasattr(plain, _CACHE):
            setattr(plain, _CACHE, plain)


@torch.no_grad()
def step(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.step() of one of torch's own classes, without the compiler and without hooks."""
    inspect.unwrap(type(optimizer).step)(optimizer)
