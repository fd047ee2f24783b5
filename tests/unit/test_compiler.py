"""torch's compiler, which takes 2 s to import, is imported by nothing that Shardline does with an optimizer."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shardline.update import ALLOWED
from shardline.update.arguments import optimizer_class
from shardline.update.torch_optim import eager

ALL_OPTIMIZERS = """
import sys
import torch
from shardline.update import ALLOWED, rule
from shardline.update.arguments import optimizer_class
from shardline.update.torch_optim import eager
eager.leave_compiler_out()
for name in ALLOWED:
    rule(name)
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.ones(3, 3)
    optimizer = optimizer_class(name)([parameter])
    eager.step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert "torch._dynamo" not in sys.modules, name
"""


def test_no_optimizer_imports_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_OPTIMIZERS], stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ALLOWED)
def test_a_step_without_the_compiler_is_the_step_that_torch_takes(name: str) -> None:
    stepped = []
    for step in (eager.step, lambda optimizer: optimizer.step()):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        optimizer = optimizer_class(name)([parameter], lr=0.1)
        for number in range(3):
            parameter.grad = torch.linspace(number, 1, 12).reshape(3, 4)
            step(optimizer)
        stepped.append(parameter.detach())
    assert torch.equal(*stepped)
