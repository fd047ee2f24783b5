"""R8 and R10: PowerSGD and DGC, each against training without a codec."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from benchmarks.reproductions import base
from benchmarks.reproductions.base import Found, Reproduction, Row, mean, spread
from benchmarks.reproductions.codecs import RAW, Task, Traffic, coded_plan, tensor_bytes_of, train
from shardline.codecs.coding import PushEncoders
from shardline.core.spec import TensorSpec

WIDTH = 48
STEPS = 800
NEAR = 0.3
"""Points of accuracy within which both papers are."""
RANKS = {1: 243.3, 2: 135.8, 4: 72.1}
"""The paper's ratios for ResNet-18."""
SPARSE = "dgc:ratio=0.001,warmup=160"


class Block(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(8, WIDTH)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of WIDTH channels."""
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(inner)))


def residual() -> nn.Module:
    """A small residual network for the digits, 84,000 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, WIDTH, 3, padding=1),
        nn.ReLU(),
        Block(),
        nn.MaxPool2d(2),
        Block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, 10),
    )


@torch.no_grad()
def accuracy(params: Mapping[str, torch.Tensor]) -> float:
    """On the test images."""
    model = residual()
    model.load_state_dict(dict(params))
    images, labels = base.digits(train=False).tensors
    return float((model(images).argmax(dim=1) == labels).double().mean())


TASK = Task(model=residual, data=lambda: base.digits(train=True), score=accuracy, steps=STEPS, lr=0.05)


def resnet18() -> tuple[TensorSpec, ...]:
    """The parameters of ResNet-18 for CIFAR-10, 11,173,962 numbers."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    shapes += [(10, 512), (10,)]
    return tuple(TensorSpec(name=str(number), shape=shape, dtype="float32") for number, shape in enumerate(shapes))


@functools.cache
def resnet18_bytes(codec: str, step: int) -> int:
    """Bytes of one push of ResNet-18's gradients."""
    plan, coding = coded_plan(resnet18(), codec, RAW)
    encoders, total = PushEncoders(coding.push), 0
    encoders.begin(0, step)
    draw = torch.Generator().manual_seed(0)
    for number, bucket in enumerate(plan.shards[0].buckets):
        total += len(tensor_bytes_of(encoders.encode(0, number, 0, torch.randn(bucket.elements, generator=draw))))
    return total


def compared(
    choices: Sequence[tuple[str, str]], seeds: Sequence[int]
) -> tuple[list[Row], dict[tuple[str, str], float]]:
    """Rows, and accuracies in percent."""
    rows: list[Row] = []
    scores: dict[tuple[str, str], float] = {}
    for up, down in choices:
        traffic = Traffic()
        found = [100.0 * TASK.score(train(TASK, up, down, seed, traffic)) for seed in seeds]
        scores[up, down] = mean(found)
        rows.append(
            {
                "up": f"`{up}`",
                "down": f"`{down}`",
                "digits, %": spread(found, 1),
                "fewer bytes up": f"{traffic.raw / traffic.pushed:.1f}x",
                "fewer bytes down": f"{traffic.raw / traffic.pulled:.1f}x",
                "ResNet-18, fewer bytes up": f"{resnet18_bytes(RAW, STEPS) / resnet18_bytes(up, STEPS):.1f}x",
            }
        )
    return rows, scores


def low_rank(seeds: Sequence[int]) -> Found:
    """R8."""
    rows, scores = compared([(RAW, RAW), *((f"powersgd:rank={rank}", RAW) for rank in RANKS)], seeds)
    ratios = {rank: resnet18_bytes(RAW, 0) / resnet18_bytes(f"powersgd:rank={rank}", 0) for rank in RANKS}
    return Found(
        rows=rows,
        verdicts={
            "the bytes of ResNet-18 are 243.3, 135.8 and 72.1 times fewer, within 2 % for what frames them": all(
                abs(ratios[rank] / paper - 1.0) < 0.02 for rank, paper in RANKS.items()
            ),
            f"rank 2 is within {NEAR} points of training without a codec": scores["powersgd:rank=2", RAW]
            >= scores[RAW, RAW] - NEAR,
        },
    )


def deep_gradient(seeds: Sequence[int]) -> Found:
    """R10."""
    down = "delta:by=sparse"
    rows, scores = compared([(RAW, RAW), (SPARSE, RAW), (SPARSE, down)], seeds)
    ratio = resnet18_bytes(RAW, STEPS) / resnet18_bytes(SPARSE, STEPS)
    return Found(
        rows=rows,
        verdicts={
            f"it is within {NEAR} points of training without a codec": scores[SPARSE, RAW] >= scores[RAW, RAW] - NEAR,
            "of ResNet-18 at least 300 times fewer bytes go up": ratio >= 300,
            "with the union of what was sent coming down, the parameters are the same": scores[SPARSE, RAW]
            == scores[SPARSE, down],
        },
    )


_SETTING = (
    "Digits, a residual network of 84,000 parameters, SGD with rate 0.05 and momentum 0.9, 4 replicas with 16 samples "
    "each, 800 steps{more}. Bytes include frames; the last column is one push of a ResNet-18 for CIFAR-10."
)
ALL = (
    Reproduction(
        number="R8",
        title="PowerSGD",
        source="Vogels et al., PowerSGD, NeurIPS 2019, tables 3 and 4",
        claim="On ResNet-18, rank 1, 2 and 4 send 243, 136 and 72 times fewer bytes, and rank 2 reaches 94.4 % where "
        "SGD reaches 94.3 %.",
        setting=_SETTING.format(more=""),
        run=low_rank,
    ),
    Reproduction(
        number="R10",
        title="Deep Gradient Compression",
        source="Lin et al., Deep Gradient Compression, ICLR 2018, table 2",
        claim="ResNet-110 on CIFAR-10 with a thousandth of the gradient is within 0.3 points of dense training, with 4 "
        "to 32 workers; the largest networks send 270 to 600 times less.",
        setting=_SETTING.format(more=", of which the first 160 send more"),
        run=deep_gradient,
    ),
)
