"""Small jobs that cover what training must get right."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.job import Job


def data() -> TensorDataset:
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.mean(dim=1, keepdim=True))


def mse(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Rich(nn.Module):
    """Batch norm, dropout, a 0-d parameter, tied weights, a frozen layer, parameters used late or by some replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied_again = nn.Linear(8, 8, bias=False)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.never = nn.Parameter(torch.ones(3))
        self.late = nn.Parameter(torch.full((4,), 0.1))
        self.some = nn.Parameter(torch.full((6,), 0.1))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.inner(x))))
        hidden = hidden + self.tied_again(torch.tanh(self.tied(hidden))) + self.frozen(hidden)
        value = self.scale * self.out(hidden)
        # Counted by a buffer, so every process agrees on when a parameter is first used.
        assert self.norm.num_batches_tracked is not None
        if int(self.norm.num_batches_tracked) > 2:
            value = value + self.late.sum()
        # Depends on the data, so some replicas of a step use it and others don't.
        if float(x[0, 0]) > 0:
            value = value + self.some.sum()
        return value


class Wide(nn.Module):
    """A matrix of 320 KB, which a plan cuts into several quanta over shards and buckets, and small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(5, 16_384)
        self.out = nn.Linear(16_384, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.rows(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1))


def broad() -> nn.Module:
    """Two matrices large enough for every codec, and vectors."""
    return nn.Sequential(nn.Linear(5, 256), nn.Tanh(), nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 1))


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2), with a number of its own to keep."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(parameter)
                state["step"] += 1
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                # As in some variants, so that the number matters.
                rate = group["lr"] / (1.0 + 0.1 * state["step"])
                parameter.add_(torch.sign(torch.lerp(parameter.grad, state["exp_avg"], first)), alpha=-rate)
                state["exp_avg"].lerp_(parameter.grad, 1.0 - second)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.05}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
}


def make_job(optimizer: str = "momentum", **changes: Any) -> Job:
    name, arguments = OPTIMIZERS[optimizer] if optimizer != "lion" else (Lion, {"lr": 0.01, "weight_decay": 0.1})
    settings: dict[str, Any] = {
        "model": mlp,
        "loss": mse,
        "dataset": data,
        "optimizer": name,
        "optimizer_args": arguments,
        "batch_size": 4,
        "replicas": 3,
        "steps": 4,
        "seed": 7,
        "name": "test",
    }
    return Job(**{**settings, **changes})
