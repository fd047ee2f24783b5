"""Handwritten digits, and a wide perceptron of 3.2 million parameters in four stages.

shardline train examples/pipeline/job.py --ps 2 --workers 4
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job, Pipeline
from shardline.schedule import cosine

TEST_SAMPLES = 360
WIDTH = 1024


def load(train: bool) -> TensorDataset:
    """Images in [0, 1] of shape (samples, 64), and labels; the split is the same in every process."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[TEST_SAMPLES:] if train else order[:TEST_SAMPLES]
    return TensorDataset(images[chosen], labels[chosen])


def make_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, WIDTH), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2)]
    layers.append(nn.Linear(WIDTH, 10))
    return Pipeline(layers, stages=4)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def evaluate(model: nn.Module) -> dict[str, float]:
    images, labels = load(train=False).tensors
    logits = model(images)
    return {
        "accuracy": float((logits.argmax(dim=1) == labels).double().mean()),
        "loss": float(nn.functional.cross_entropy(logits, labels)),
    }


job = Job(
    model=make_model,
    loss=loss,
    dataset=lambda: load(train=True),
    evaluate=evaluate,
    optimizer="SGD",
    optimizer_args={"lr": 0.1, "momentum": 0.9},
    schedule=cosine(),
    batch_size=8,
    accumulate=8,
    steps=150,
    checkpoint_every=50,
    pipeline="flush",
)
