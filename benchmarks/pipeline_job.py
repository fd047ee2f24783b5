"""Models in stages as a job file: like VGG, with large fully connected layers, like ResNet, and equal linear layers.

    shardline train benchmarks/pipeline_job.py --workers 4 -- --model vgg --replicas 4
    shardline train benchmarks/pipeline_job.py --workers 4 -- --model vgg --pipeline flush --microbatches 8

A step always takes `batch` samples: of each replica its part, in so many microbatches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shlex
import time
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline

SAMPLES, CLASSES = 512, 10
IMAGE = (3, 32, 32)
CHANNELS = 16


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["vgg", "mlp", "resnet"], default="vgg")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--pipeline", default="whole-model")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--marks", type=Path, help="folder: workers that call the loss write when each step begins")
    return parser.parse_args(arguments)


def vgg(width: int) -> tuple[list[nn.Module], list[int]]:
    """Layers, and those that begin a stage: convolutions, then three large layers of equal size (width 2048)."""
    layers: list[nn.Module] = []
    channels = IMAGE[0]
    for wider in (32, 64, 128):
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = wider
    layers += [nn.Flatten()]
    cuts = []
    size = channels * 4 * 4
    for _ in range(3):
        cuts.append(len(layers))
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return [*layers, nn.Linear(size, CLASSES)], cuts


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Two convolutions, and the input."""
        return torch.relu(values + self.second(torch.relu(self.first(values))))


def resnet(stages: int) -> tuple[list[nn.Module], list[int]]:
    """Residual blocks: few parameters, large activations."""
    blocks = [Block(CHANNELS) for _ in range(stages)]
    layers = [nn.Conv2d(IMAGE[0], CHANNELS, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return [*layers, nn.Linear(CHANNELS, CLASSES)], list(range(2, stages + 1))


def mlp(width: int, stages: int) -> tuple[list[nn.Module], list[int]]:
    """Two equal layers in each stage."""
    layers = [layer for _ in range(2 * stages) for layer in (nn.Linear(width, width), nn.ReLU())]
    return layers, [4 * stage for stage in range(1, stages)]


def model() -> nn.Module:
    """The model in stages."""
    if OPTIONS.model == "resnet":
        layers, cuts = resnet(OPTIONS.stages)
    else:
        layers, cuts = vgg(OPTIONS.width) if OPTIONS.model == "vgg" else mlp(OPTIONS.width, OPTIONS.stages)
    return shardline.Pipeline(layers, stages=cuts)


def data() -> TensorDataset:
    """Points of the model's input shape."""
    shape = (OPTIONS.width,) if OPTIONS.model == "mlp" else IMAGE
    classes = OPTIONS.width if OPTIONS.model == "mlp" else CLASSES
    return TensorDataset(torch.randn(SAMPLES, *shape), torch.randint(0, classes, (SAMPLES,)))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy."""
    if OPTIONS.marks is not None and next(CALLS) % OPTIONS.microbatches == 0:
        marks().write(b"%f\n" % time.monotonic())
    result: torch.Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return result


@functools.cache
def marks() -> BinaryIO:
    """Where this process writes when a step begins."""
    return open(OPTIONS.marks / str(os.getpid()), "wb", buffering=0)


CALLS = itertools.count()
"""Of the loss."""
OPTIONS = parse(shlex.split(os.environ.get("SHARDLINE_JOB_ARGS", "")))
job = shardline.Job(
    model=model,
    loss=loss,
    dataset=data,
    optimizer="SGD",
    optimizer_args={"lr": 1e-3},
    batch_size=OPTIONS.batch // OPTIONS.replicas // OPTIONS.microbatches,
    accumulate=OPTIONS.microbatches,
    replicas=OPTIONS.replicas,
    steps=OPTIONS.steps,
    pipeline=OPTIONS.pipeline,
    name="bench-pipeline",
)
