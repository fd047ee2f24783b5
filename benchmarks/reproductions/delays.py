"""R1 to R3: what a delay does to plain SGD, and what dividing by it mends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.reproductions.base import (
    Curve,
    Found,
    Reproduction,
    Row,
    accuracy,
    digits_job,
    mean,
    spread,
    timing,
    train,
)
from shardline.job import Job

DELAYS = (0, 1, 3, 7, 15)
EDGE_STEPS = 1500
EDGE_ERROR = 0.02


class Parabola(nn.Module):
    """Half the square of one number: curvature 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        """The value."""
        return 0.5 * (self.x * self.x).sum()


def grows(delay: int, rate: float) -> bool:
    """Whether x runs away if each gradient is applied after `delay` others, from workers of equal pace."""
    job = Job(
        name="parabola",
        model=Parabola,
        loss=lambda model, batch: model(),
        dataset=lambda: TensorDataset(torch.zeros(4)),
        optimizer="SGD",
        optimizer_args={"lr": rate},
        batch_size=1,
        replicas=1,
        steps=EDGE_STEPS,
        consistency="async",
    )
    found = train(job, delay + 1, cv=0.0)
    return found.result is None or not float(found.params["x"].abs()) < 1.0


def edge(delay: int, limit: float) -> float:
    """The largest rate that doesn't run away, to half a hundredth of the limit."""
    low, high = 0.8 * limit, 1.2 * limit
    while high - low > 0.005 * limit:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(delay, middle) else (middle, high)
    return (low + high) / 2


def stability(seeds: Sequence[int]) -> Found:
    """R1."""
    rows: list[Row] = []
    for delay in DELAYS:
        limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
        found = edge(delay, limit)
        rows.append(
            {"delay": delay, "limit": round(limit, 5), "found": round(found, 5), "ratio": round(found / limit, 4)}
        )
    return Found(
        rows=rows,
        verdicts={"every edge is within 2 % of the limit": all(abs(row["ratio"] - 1) < EDGE_ERROR for row in rows)},
        curves=[
            Curve(label="limit", x=DELAYS, y=[row["limit"] for row in rows]),
            Curve(label="found", x=DELAYS, y=[row["found"] for row in rows]),
        ],
        axes=("delay (updates)", "largest stable rate x curvature"),
    )


def lags(seeds: Sequence[int]) -> Found:
    """R2."""
    rows: list[Row] = []
    for workers in (8, 16):
        for cv in (0.1, 0.6):
            job = digits_job(optimizer_args={"lr": 0.1}, consistency="async", steps=20_000)
            found = [timing(job, workers, cv=cv, seed=seed).staleness for seed in seeds]
            rows.append(
                {"mode": "async", "workers": workers, "cv": cv, "expected": workers - 1, "mean lag": spread(found)}
            )
    bounded = True
    for n in (1, 2, 15, 30):
        job = digits_job(optimizer_args={"lr": 0.1}, consistency=f"softsync:n={n}", steps=200 * n)
        runs = [timing(job, 30, cv=0.1, seed=seed) for seed in seeds]
        most = max(result.staleness_max for result in runs)
        bounded = bounded and most <= 2 * n
        rows.append(
            {
                "mode": f"softsync:n={n}",
                "workers": 30,
                "cv": 0.1,
                "expected": round(n * (1 - 1 / 30), 2),
                "mean lag": spread([result.staleness for result in runs]),
                "largest": most,
            }
        )
    return Found(
        rows=rows,
        verdicts={
            "the mean lag is within 2 % of W - 1": all(
                abs(float(row["mean lag"].split()[0]) / row["expected"] - 1) < 0.02
                for row in rows
                if row["mode"] == "async"
            ),
            "under softsync no lag is above 2n": bounded,
        },
    )


def divided(seeds: Sequence[int]) -> Found:
    """R3."""
    rows: list[Row] = []
    rate, learners = 0.2, 30
    ends: dict[tuple[str, int], float] = {}
    for n in (1, 2, 15, 30):
        for rule in ("torch", "staleness-aware"):
            found = []
            for seed in seeds:
                job = digits_job(
                    optimizer_args={"lr": rate},
                    consistency=f"softsync:n={n}",
                    rule=rule,
                    # As many passes over the data, whatever the number of gradients in an update.
                    steps=250 * n,
                    seed=seed,
                )
                found.append(accuracy(train(job, learners, seed=seed).params))
            ends[rule, n] = mean(found)
            rows.append({"n": n, "rate": "constant" if rule == "torch" else "rate / lag", "accuracy": spread(found)})
    return Found(
        rows=rows,
        verdicts={
            "a constant rate fails for n = 15 and 30": max(ends["torch", 15], ends["torch", 30]) < 0.5,
            "rate / lag learns for every n": min(ends["staleness-aware", n] for n in (1, 2, 15, 30)) > 0.85,
        },
        curves=[
            Curve(label=label, x=(1, 2, 15, 30), y=[ends[rule, n] for n in (1, 2, 15, 30)])
            for rule, label in (("torch", "constant rate"), ("staleness-aware", "rate / lag"))
        ],
        axes=("n", "accuracy"),
    )


ALL = (
    Reproduction(
        number="R1",
        title="The stability limit of delayed SGD",
        source="Derived from x(t+1) = x(t) - r h x(t-d): stable below r h = 2 sin(pi / (2 (2d + 1)))",
        claim="The largest stable rate falls from 2 without delay to 0.445 at a delay of 3 and 0.101 at 15.",
        setting="One parameter with curvature 1; d + 1 virtual workers of equal pace push asynchronously, so that each "
        "gradient is applied after exactly d others.",
        run=stability,
    ),
    Reproduction(
        number="R2",
        title="How late pushes are",
        source="Closed form; Zhang et al., Staleness-aware Async-SGD, IJCAI 2016, section 3",
        claim="The mean lag is W - 1, whatever the speeds; under n-softsync it is about n, and at most 2n.",
        setting="Timing only, passes with a spread (cv) of 0.1 and 0.6; 20,000 pushes.",
        run=lags,
    ),
    Reproduction(
        number="R3",
        title="Dividing the rate by the lag",
        source="Zhang et al., Staleness-aware Async-SGD, IJCAI 2016, section 5 (a small network on CIFAR-10)",
        claim="With 30 learners a constant rate fails for n = 15 and 30 (90 % error); the rate divided by the lag "
        "gives about 18 % error for every n.",
        setting="Digits, plain SGD, rate 0.2, 30 workers, 250 batches each.",
        run=divided,
    ),
)
