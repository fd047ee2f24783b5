"""A job of many small tensors, which notes what its processes have computed so far when each forward pass begins.

See benchmarks/sets/tensors.py. The environment says how many parameters there are, and where the notes go.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job

TENSORS, STAMPS = "SHARDLINE_BENCH_TENSORS", "SHARDLINE_BENCH_STAMPS"
WIDTH = 3


def spent_s(mark: str) -> float:
    """Processor seconds of all processes with this file for STAMPS, and of their children that ended."""
    seconds = 0.0
    for process in psutil.process_iter():
        # It may end meanwhile, or be another user's.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(STAMPS) == mark:
                seconds += sum(process.cpu_times()[:4])
    return seconds


class Many(nn.Module):
    """A linear layer and as many parameters of three elements as the environment says."""

    def __init__(self) -> None:
        super().__init__()
        count = int(os.environ.get(TENSORS, "100"))
        self.many = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) * 0.01) for _ in range(count)])
        self.out = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 1)."""
        if STAMPS in os.environ:
            with Path(os.environ[STAMPS]).open("a", encoding="utf-8") as stamps:
                stamps.write(f"{spent_s(os.environ[STAMPS])}\n")
        result: torch.Tensor = self.out(inputs) + torch.stack(list(self.many)).sum()
        return result


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
job = Job(
    model=Many,
    loss=loss,
    dataset=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
    batch_size=16,
    replicas=2,
    steps=20,
    optimizer="Adam",
    optimizer_args={"lr": 1e-6},
)
