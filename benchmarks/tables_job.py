"""Embedding tables as a job file: 26 features with the ids of examples/clicks, Zipf's law over 100,000 each.

    shardline train benchmarks/tables_job.py -- --model bags --dim 64 --batch 2048    # figures go to $BENCH_OUT

Models: `bags`, all features' bags summed into one linear layer; `clicks`, the one of examples/clicks; `dense`, the same
with whole tables as parameters (nn.EmbeddingBag). A step is the time from one forward pass to the next.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shardline
from benchmarks.cluster import OUT
from benchmarks.figures import StepTimes
from examples.clicks.job import DIM, FEATURES, IDS, Clicks, load
from shardline.nn import EmbeddingBagCollection

NAMES = [f"feature{number}" for number in range(FEATURES)]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["bags", "clicks", "dense"], default="bags")
    parser.add_argument("--dim", type=int, default=64, help=f"of the rows, for bags; {DIM} in the others")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=0, help="width of two more dense layers; 0 = as in the example")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    return parser.parse_args(arguments)


class Bags(nn.Module):
    """The bags of all features, summed, into one linear layer: the tables are nearly all of the work."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        rule = "rowwise-adagrad:lr=0.1"
        self.features = EmbeddingBagCollection({name: shardline.EmbeddingTable(name, dim, rule=rule) for name in NAMES})
        self.last = nn.Linear(dim, 1)

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Logits (float32 [samples]). numbers: not used."""
        bags = self.features({name: ids[:, number : number + 1] for number, name in enumerate(NAMES)})
        found: torch.Tensor = self.last(torch.stack(list(bags.values())).sum(0)).squeeze(1)
        return found


class WholeTables(nn.Module):
    """An EmbeddingBagCollection whose tables are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.ModuleDict({name: nn.EmbeddingBag(IDS, DIM, mode="sum") for name in NAMES})

    def forward(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """float32 [B, dim] by feature."""
        return {name: bag(ids[name]) for name, bag in self.features.items()}


class Training:
    """One process's model and clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.marks: list[float] = []

    def model(self) -> nn.Module:
        """The model that the flags name."""
        if self.options.model == "bags":
            return Bags(self.options.dim)
        model: nn.Module = Clicks()
        if width := self.options.hidden:
            first = model.top[0].in_features
            model.top = nn.Sequential(
                *(nn.Linear(first, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
            )
        if self.options.model == "dense":
            model.features = WholeTables()
        return model

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Of the batch that the sample numbers: taking samples together is not what is measured."""
        self.marks.append(time.perf_counter())
        if len(self.marks) == self.options.warmup + self.options.steps + 1 and OUT in os.environ:
            # Workers end together; the file is always one worker's.
            part = Path(f"{os.environ[OUT]}.{os.getpid()}")
            seconds = [after - before for before, after in pairwise(self.marks)][self.options.warmup :]
            part.write_text(json.dumps(StepTimes(tuple(seconds)).summary()), encoding="utf-8")
            part.replace(os.environ[OUT])
        start = int(batch[0]) * self.options.batch
        ids, numbers, clicks = (values[start : start + self.options.batch] for values in samples())
        return functional.binary_cross_entropy_with_logits(model(ids, numbers), clicks)


@functools.cache
def samples() -> tuple[torch.Tensor, ...]:
    """Ids, numbers and clicks of examples/clicks."""
    return load(train=True).tensors


training = Training(parse(shlex.split(os.environ.get("SHARDLINE_JOB_ARGS", ""))))
job = shardline.Job(
    model=training.model,
    loss=training.loss,
    dataset=TensorDataset(torch.arange(64)),
    optimizer="Adagrad",
    optimizer_args={"lr": 0.02},
    batch_size=1,
    replicas=training.options.workers,
    # One more, whose beginning is the end of the last one that counts.
    steps=training.options.warmup + training.options.steps + 1,
    name="bench",
)
