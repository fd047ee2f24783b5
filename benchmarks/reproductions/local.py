"""R11: DiLoCo, on characters of Python's own sources."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.reproductions.base import Curve, Found, Reproduction, Row, mean, spread, train
from shardline.job import Job

CONTEXT, CODES = 12, 128
TEXT_BYTES, TEST_BYTES = 400_000, 20_000
PASSES, REPLICAS = 2000, 4
BATCH = 32


@functools.cache
def text() -> torch.Tensor:
    """Characters of modules of the standard library, in the order of their names; int64, below 128."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += bytes(code for code in path.read_bytes() if code < CODES)
        if len(found) >= TEXT_BYTES + TEST_BYTES:
            break
    return torch.frombuffer(found[: TEXT_BYTES + TEST_BYTES], dtype=torch.uint8).to(torch.int64)


@functools.cache
def windows(train: bool) -> TensorDataset:
    """(CONTEXT characters, the next one) at every place of the text; its end is for tests."""
    part = text()[:TEXT_BYTES] if train else text()[TEXT_BYTES:]
    every = part.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(every[:, :-1], every[:, -1])


def model() -> nn.Module:
    """Guesses a character from the CONTEXT before it; about 40,000 parameters."""
    return nn.Sequential(
        nn.Embedding(CODES, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, CODES)
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy, in nats per character."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def test_loss(params: Mapping[str, torch.Tensor]) -> float:
    """The same on the text's end."""
    found = model()
    found.load_state_dict(dict(params))
    inputs, following = windows(train=False).tensors
    return float(nn.functional.cross_entropy(found(inputs), following))


CADENCES = (
    ("synchronous", "every-step", 1),
    ("DiLoCo, H = 50", "diloco:every=50", 50),
    ("outer SGD, H = 50", "local-sgd:every=50", 50),
    ("DiLoCo, H = 200", "diloco:every=200", 200),
    ("outer SGD, H = 200", "local-sgd:every=200", 200),
)


def diloco(seeds: Sequence[int]) -> Found:
    """R11."""
    rows: list[Row] = []
    ends: dict[str, float] = {}
    sent: dict[str, float] = {}
    for label, cadence, every in CADENCES:
        losses = []
        for seed in seeds:
            job = Job(
                name="characters",
                model=model,
                loss=loss,
                dataset=functools.partial(windows, True),
                optimizer="AdamW",
                optimizer_args={"lr": 0.002},
                cadence=cadence,
                batch_size=BATCH,
                replicas=REPLICAS,
                steps=PASSES // every,
                seed=seed,
            )
            trained = train(job, REPLICAS, seed=seed)
            losses.append(test_loss(trained.params))
            if trained.result is not None:
                sent[label] = trained.result.push_bytes / PASSES
        ends[label] = mean(losses)
        rows.append(
            {
                "training": label,
                "test loss": spread(losses, 4),
                "more than synchronous": f"{ends[label] / ends['synchronous'] - 1:+.1%}",
                "pushed bytes per pass": round(sent[label]),
                "fewer by": round(sent["synchronous"] / sent[label], 1),
            }
        )
    return Found(
        rows=rows,
        verdicts={
            "with H = 50, DiLoCo is within 3 % of synchronous": ends["DiLoCo, H = 50"] < 1.03 * ends["synchronous"],
            "at 50 times fewer bytes": sent["synchronous"] / sent["DiLoCo, H = 50"] > 49.9,
            "outer SGD is worse than outer Nesterov with H = 200": ends["outer SGD, H = 200"] > ends["DiLoCo, H = 200"],
        },
        curves=[
            Curve(label=outer, x=(50, 200), y=[ends[f"{outer}, H = {every}"] for every in (50, 200)])
            for outer in ("DiLoCo", "outer SGD")
        ],
        axes=("H", "test loss (nats per character)"),
    )


ALL = (
    Reproduction(
        number="R11",
        title="DiLoCo",
        source="Douillard et al., DiLoCo, 2023, on C4",
        claim="With rounds of H = 50 to 500 passes the loss is about that of synchronous training, at H times fewer "
        "bytes; outer SGD is worse than outer Nesterov momentum.",
        setting="A network of 40,000 parameters guesses characters of Python's standard library; AdamW, 4 replicas, "
        "2,000 passes each, so few that H is at most 200.",
        run=diloco,
    ),
)
