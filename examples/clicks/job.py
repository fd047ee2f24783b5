"""Clicks: 26 categorical features with Zipf-distributed ids and 13 numbers, a small DLRM over 26 embedding tables.

shardline train examples/clicks/job.py --ps 2 --workers 2 --evaluators 1
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import EmbeddingTable, Job
from shardline.nn import EmbeddingBagCollection

FEATURES, NUMBERS = 26, 13
IDS = 100_000
"""Ids that a feature may have; most samples have a few hundred of them."""
DIM = 16
SAMPLES, TEST_SAMPLES = 200_000, 20_000


def taste(ids: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
    """How much an id of a feature invites a click: a number in [-1, 1) that is fixed, but looks random."""
    mixed = (ids * 2654435761 + feature * 40503 + 12345) % 1_000_003
    return mixed.double() / 500_001.5 - 1


@functools.cache
def load(train: bool) -> TensorDataset:
    """Ids (int64 [samples, 26]), numbers (float32 [samples, 13]) and clicks (float32 [samples])."""
    count = SAMPLES if train else TEST_SAMPLES
    generator = torch.Generator().manual_seed(1 if train else 2)
    # Zipf's law with exponent 1: the logarithm of an id's rank is uniform.
    ranks = torch.rand(count, FEATURES, generator=generator, dtype=torch.float64)
    ids = torch.exp(ranks * torch.log(torch.tensor(float(IDS)))).long()
    numbers = torch.randn(count, NUMBERS, generator=generator)
    score = taste(ids, torch.arange(FEATURES)).sum(1) + 0.5 * numbers[:, :4].sum(1) - 0.5
    clicks = torch.rand(count, generator=generator) < torch.sigmoid(score)
    return TensorDataset(ids, numbers, clicks.float())


class Clicks(nn.Module):
    """Naumov et al., "Deep Learning Recommendation Model", 2019: bottom network, pairwise products, top network."""

    def __init__(self) -> None:
        super().__init__()
        tables = {
            f"feature{number}": EmbeddingTable(f"feature{number}", DIM, rule="rowwise-adagrad:lr=0.1")
            for number in range(FEATURES)
        }
        self.features = EmbeddingBagCollection(tables)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, DIM))
        pairs = (FEATURES + 1) * FEATURES // 2
        self.top = nn.Sequential(nn.Linear(DIM + FEATURES * DIM + pairs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Logits (float32 [samples]) of clicks."""
        bags = self.features({name: ids[:, number : number + 1] for number, name in enumerate(self.features.features)})
        bottom = self.bottom(numbers)
        vectors = torch.stack([bottom, *bags.values()], 1)
        first, second = torch.triu_indices(FEATURES + 1, FEATURES + 1, 1)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        found: torch.Tensor = self.top(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)
        return found


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    ids, numbers, clicks = batch
    return nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), clicks)


def evaluate(model: nn.Module) -> dict[str, float]:
    ids, numbers, clicks = load(train=False).tensors
    logits = model(ids, numbers)
    # The probability that a click has a higher logit than no click.
    ranks = logits.argsort().argsort().double() + 1
    positive = clicks.bool()
    hits, misses = int(positive.sum()), int((~positive).sum())
    auc = (float(ranks[positive].sum()) - hits * (hits + 1) / 2) / (hits * misses)
    return {"auc": auc, "loss": float(nn.functional.binary_cross_entropy_with_logits(logits, clicks))}


job = Job(
    name="clicks",
    model=Clicks,
    loss=loss,
    dataset=lambda: load(train=True),
    evaluate=evaluate,
    optimizer="Adagrad",
    optimizer_args={"lr": 0.02},
    batch_size=1024,
    replicas=2,
    steps=200,
    checkpoint_every=100,
)
