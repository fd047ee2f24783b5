"""Handwritten digits with noise, and a small U-Net that removes it: skip connections past the stages between.

shardline train examples/pipeline/unet.py --ps 2 --workers 3
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job, Pipeline
from shardline.schedule import cosine

TEST_SAMPLES = 360
BATCH = 16
WIDTH = 12
NOISE = 0.5
"""Standard deviation; pixels are in [0, 1]."""


def load(train: bool) -> TensorDataset:
    """Images in [0, 1] of shape (samples, 1, 8, 8); the split is the same in every process."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return TensorDataset(images[order[TEST_SAMPLES:] if train else order[:TEST_SAMPLES]])


class Block(nn.Module):
    """Two convolutions with batch norm, around which the input goes too."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.past = nn.Conv2d(inputs, outputs, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(values)).relu()) + self.past(values)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """8 x 8 pixels, 4 x 4, 2 x 2, and back; each size on the way back sees what was made on the way there."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(1, WIDTH), Block(WIDTH, 2 * WIDTH)])
        self.bottom = Block(2 * WIDTH, 4 * WIDTH)
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 2, 2), nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2)]
        )
        self.up = nn.ModuleList([Block(4 * WIDTH, 2 * WIDTH), Block(2 * WIDTH, WIDTH)])
        self.out = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values, seen = images, []
        for block in self.down:
            values = block(values)
            seen.append(values)
            values = nn.functional.max_pool2d(values, 2)
        values = self.bottom(values)
        for widen, block in zip(self.widen, self.up, strict=True):
            values = block(torch.cat([widen(values), seen.pop()], dim=1))
        return images + self.out(values)  # type: ignore[no-any-return]


def make_model() -> nn.Module:
    # down.0, and down.1; the bottom; both ways up. The bottom hands on what it does not use.
    return Pipeline.split(UNet(), torch.zeros(BATCH, 1, 8, 8), cuts=["bottom", "widen.0"])


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    (images,) = batch
    return nn.functional.mse_loss(model(images + NOISE * torch.randn_like(images)), images)


def evaluate(model: nn.Module) -> dict[str, float]:
    """Mean squared error per pixel, after the model and before."""
    (images,) = load(train=False).tensors
    noise = NOISE * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return {
        "error": float(nn.functional.mse_loss(model(images + noise), images)),
        "error_before": float(noise.square().mean()),
    }


job = Job(
    model=make_model,
    loss=loss,
    dataset=lambda: load(train=True),
    evaluate=evaluate,
    best_metric="error",
    optimizer="Adam",
    optimizer_args={"lr": 2e-3},
    schedule=cosine(),
    batch_size=BATCH,
    accumulate=4,
    steps=150,
    checkpoint_every=50,
    pipeline="flush",
)
