"""The small job that chaos trains: quick, with everything that draws random numbers, and it counts its own updates.

A job file of one line makes it: job = chaos_job(mode="sync", ...). Three extra tensors, on different shards where there
are several, get a gradient of exactly -1 for each sample of a batch, at the sample's place. Plain SGD with a rate of
1/16 so counts in them how often each sample's gradient is in the parameters: exactly, as long as nothing is clipped or
averaged, which is the case in asynchronous mode.

CHAOS_MARKS names a file that gets the time of every batch that is computed, CHAOS_STEP_S is how long each takes.
"""

from __future__ import annotations

import array
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardline import EmbeddingTable, Job, Pipeline
from shardline.nn import Embedding, EmbeddingBag

SAMPLES = 256
BATCH = 8
RATE = 1.0 / 16.0
NARROW, WIDE = 40, 400
SHARED = {"0": "gathered", "4": "gathered"}
"""Styles of the layers that workers share."""
COUNTERS = ("counts.0", "counts.1", "counts.2")
VISITS = "visits"
"""The table that counts, by the number of a sample."""
MARKS = "CHAOS_MARKS"
STEP_S = "CHAOS_STEP_S"


class Points:
    """Points, their class, and their number; augmented at random."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(SAMPLES, 12, generator=generator)
        self.labels = (self.points @ torch.randn(12, 4, generator=generator)).argmax(dim=1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        point = self.points[index]
        if torch.rand(()) < 0.5:
            point = point * 1.1
        return point + 0.05 * torch.randn(12), self.labels[index], index


def layers(width: int) -> list[nn.Module]:
    """Dropout and batch norm between two that learn."""
    return [nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)]


def stages(width: int) -> Pipeline:
    """The layers in three stages, without the counters, which no stage could hold."""
    return Pipeline(layers(width), stages=[1, 4])


class Net(nn.Module):
    """Dropout and batch norm, and the counters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(width))
        self.counts = nn.ParameterList([nn.Parameter(torch.zeros(SAMPLES)) for _ in COUNTERS])

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(points)
        return logits

    def visits(self, index: torch.Tensor) -> torch.Tensor:
        """What counts the samples of a batch."""
        return torch.stack([count[index].sum() for count in self.counts]).sum()


class Tabled(Net):
    """With a table that learns, and one that counts as the counters do."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.signs = EmbeddingBag(EmbeddingTable("signs", 4, rule="adagrad:lr=0.05"))
        self.visited = Embedding(EmbeddingTable(VISITS, 1, rule=f"sgd:lr={RATE}", init="zeros"))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points) + self.signs((points * 2).long() * 7919)

    def visits(self, index: torch.Tensor) -> torch.Tensor:
        return super().visits(index) + self.visited(index).sum()


def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Cross entropy; the counters change its gradient and not its value."""
    points, labels, index = batch
    value = nn.functional.cross_entropy(model(points), labels)
    if not isinstance(model, Net):
        _mark()
        return value
    visits = -model.visits(index)
    _mark()
    total: torch.Tensor = value + (visits - visits.detach())
    return total


def _mark() -> None:
    """Tell that a batch is being computed, and take the time it takes."""
    path = os.environ.get(MARKS)
    if path:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(handle, array.array("d", [time.time()]).tobytes())
        os.close(handle)
    time.sleep(float(os.environ.get(STEP_S, "0")))


def read_marks(path: Path) -> list[float]:
    """Unix time of every batch that was computed, in order."""
    times = array.array("d")
    if path.exists():
        data = path.read_bytes()
        times.frombytes(data[: len(data) // 8 * 8])
    return sorted(times)


def evaluate(model: nn.Module) -> Mapping[str, float]:
    """Accuracy on all points."""
    data = Points()
    logits = model(data.points)
    return {"accuracy": float((logits.argmax(dim=1) == data.labels).double().mean())}


def chaos_job(*, mode: str, tables: bool = False, **fields: Any) -> Job:
    """The job; fields: of Job."""
    momentum = {"momentum": 0.9} if mode.startswith("sync") else {}
    # Small tensors are not encoded.
    width = WIDE if {"codec_up", "codec_parcels"} & fields.keys() else NARROW
    staged = fields.get("pipeline", "whole-model") != "whole-model" or "tensor_parallel" in fields
    return Job(
        model=functools.partial(stages if staged else Tabled if tables else Net, width),
        loss=loss,
        dataset=Points,
        evaluate=evaluate,
        optimizer="SGD",
        optimizer_args={"lr": RATE, **momentum},
        batch_size=BATCH,
        consistency=mode,
        name="chaos",
        **fields,
    )


def write_job(path: Path, *, mode: str, **fields: Any) -> Path:
    """The job file."""
    given = ", ".join(f"{name}={value!r}" for name, value in {"mode": mode, **fields}.items())
    path.write_text(f"from tests.chaos.job import chaos_job\n\njob = chaos_job({given})\n", encoding="utf-8")
    return path
