"""A row of a table in docs/jobs.md, and what its cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.job import Job

Loop = Callable[[nn.Module, torch.optim.Optimizer, Iterator[int]], None]
"""A script's own training loop."""
SAME = "as in PyTorch"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))


@dataclass(frozen=True)
class Script:
    """A user's own loop, of six steps."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loop: Loop
    model: Callable[[], nn.Module] = mlp
    overlaps: bool = True
    """True if the script may ask for overlap: nothing changes gradients between backward() and step()."""


@dataclass(frozen=True)
class Row:
    """A row of a table. jobs, scripts: by name of the case."""

    what: str
    """The first cell."""
    says: str = SAME
    """The second cell: SAME with more words, or "refused" and the sentence."""
    jobs: dict[str, Callable[[], Job]] = field(default_factory=dict)
    scripts: dict[str, Script] = field(default_factory=dict)
    finds: dict[str, str] = field(default_factory=dict)
    """By name of the case: a pattern with which the whole message begins, if it has more than the sentence."""

    @property
    def sentence(self) -> str | None:
        """The sentence with which it is refused, between backquotes; None if it is done as in PyTorch."""
        return self.says.split("`")[1] if self.says.startswith("refused") else None


def data() -> TensorDataset:
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def job(model: Callable[[], nn.Module], **changes: Any) -> Callable[[], Job]:
    settings: dict[str, Any] = {
        "loss": mse,
        "dataset": data,
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.05, "momentum": 0.9},
        "batch_size": 4,
        "replicas": 2,
        "steps": 4,
        "seed": 7,
        "name": "model",
    }
    return lambda: Job(model=model, **{**settings, **changes})


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
