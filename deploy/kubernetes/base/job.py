"""Handwritten digits: 1,797 real 8x8 images that come with scikit-learn, and a small convolutional network.

shardline train examples/digits/job.py --ps 2 --workers 2 --evaluators 1
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job
from shardline.schedule import cosine

TEST_SAMPLES = 360


def load(train: bool) -> TensorDataset:
    """Images in [0, 1] of shape (samples, 1, 8, 8), and labels; the split is the same in every process."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[TEST_SAMPLES:] if train else order[:TEST_SAMPLES]
    return TensorDataset(images[chosen], labels[chosen])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def evaluate(model: nn.Module) -> dict[str, float]:
    device = next(model.parameters()).device
    images, labels = (tensor.to(device) for tensor in load(train=False).tensors)
    logits = model(images)
    return {
        "accuracy": float((logits.argmax(dim=1) == labels).double().mean()),
        "loss": float(nn.functional.cross_entropy(logits, labels)),
    }


job = Job(
    name="digits",
    model=make_model,
    loss=loss,
    dataset=lambda: load(train=True),
    evaluate=evaluate,
    optimizer="SGD",
    optimizer_args={"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
    schedule=cosine(warmup_steps=20),
    batch_size=32,
    replicas=2,
    steps=500,
    checkpoint_every=100,
)
