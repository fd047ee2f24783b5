"""A job whose passes take gamma distributed times by sleeping, so that many workers share few cores unhindered.

    shardline train benchmarks/simulated_job.py -- --mean 0.1 --cv 0.3 --width 512
    shardline train benchmarks/simulated_job.py --workers 4 --set pipeline=flush --set accumulate=4 -- --stages 4

A third of a pass is its forward part, the rest its backward part; each layer takes its share of both. The times follow
from the job's seed, the step and the replica. With --stages, the mean is that of a microbatch in one stage.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline
from shardline_lab.simulator.workers import FORWARD

LAYERS = 4
PAUSES = 0.1
"""Share of passes that --pauses makes longer."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags. mean: seconds; width: of each of LAYERS square layers of float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mean", type=float, default=0.1)
    parser.add_argument("--cv", type=float, default=0.3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--stages", type=int, default=0, help="a model in so many stages of a layer each")
    parser.add_argument("--slow", type=float, default=1.0, help="the last stage takes so many times as long")
    parser.add_argument("--layers", type=float, nargs="+", default=[], help="seconds of each layer instead of --stages")
    parser.add_argument("--cuts", type=int, nargs="+", default=[], help="layers that begin a stage")
    parser.add_argument("--homes", type=int, nargs="+", default=[], help="the worker of each stage")
    parser.add_argument("--pauses", type=float, default=1.0, help="one pass of ten takes so many times as long")
    return parser.parse_args(arguments)


class _Sleep(torch.autograd.Function):
    """The values themselves, after a while, and the gradients likewise."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(FORWARD * seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep((1 - FORWARD) * ctx.seconds)
        return gradients[0], None


class Sleepy(nn.Module):
    """Layers that each take their part of a pass."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        width = options.width
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Take a time drawn from torch's generator, which the job seeds for each step and replica."""
        shape = 1 / self.options.cv**2
        drawn = torch._standard_gamma(torch.tensor(shape, dtype=torch.float64))
        seconds = float(drawn) / shape * self.options.mean
        if float(torch.rand(())) < PAUSES:
            seconds *= self.options.pauses
        values = inputs.requires_grad_()
        for layer in self.layers:
            values = layer(_Sleep.apply(values, seconds / LAYERS))  # type: ignore[no-untyped-call]
        return values


class SleepyStage(nn.Module):
    """A layer that takes its time, drawn from torch's generator, which goes along with the microbatch."""

    def __init__(self, width: int, mean_s: float, cv: float) -> None:
        super().__init__()
        self.mean_s = mean_s
        self.shape = 1 / cv**2 if cv else 0.0
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output, after the forward part of the time."""
        seconds = self.mean_s
        if self.shape:
            drawn = torch._standard_gamma(torch.tensor(self.shape, dtype=torch.float64))
            seconds *= float(drawn) / self.shape
        values = inputs if inputs.requires_grad else inputs.clone().requires_grad_()
        return self.layer(_Sleep.apply(values, seconds))  # type: ignore[no-any-return, no-untyped-call]


def make_model() -> nn.Module:
    """The model, in stages if there are to be some."""
    if not options.stages and not options.layers:
        return Sleepy(options)
    means = options.layers or [options.mean] * (options.stages - 1) + [options.mean * options.slow]
    layers = [SleepyStage(options.width, mean_s, options.cv) for mean_s in means]
    cuts = options.cuts or list(range(1, options.stages))
    return shardline.Pipeline(layers, stages=cuts, workers=[[home] for home in options.homes])


options = parse(shlex.split(os.environ.get("SHARDLINE_JOB_ARGS", "")))
job = shardline.Job(
    model=make_model,
    loss=lambda model, batch: model(batch[0]).square().mean(),
    dataset=TensorDataset(torch.zeros(64, options.width)),
    optimizer="SGD",
    optimizer_args={"lr": 1e-3},
    batch_size=1,
    steps=100,
    name="simulated",
)
