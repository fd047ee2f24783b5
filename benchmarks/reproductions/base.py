"""What all reproductions share: the data, a job under the virtual clock, and how a result is kept."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.errors import NonFiniteError
from shardline.job import Job
from shardline_lab.simulator.gradients import parameters, training_contents
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Setup, Simulation
from shardline_lab.simulator.times import Gamma

RESULTS = Path(__file__).parents[1] / "results" / "reproductions"
SEEDS = (0, 1, 2)
TEST_SAMPLES = 360
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of a plot, under one label."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Outcome of one reproduction. verdicts: whether each part of the claim's shape came out."""

    rows: Sequence[Row]
    verdicts: Mapping[str, bool]
    curves: Sequence[Curve] = ()
    axes: tuple[str, str] = ("", "")


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One claim."""

    number: str
    title: str
    source: str
    claim: str
    setting: str
    run: Callable[[Sequence[int]], Found] = field(repr=False)
    """Called with the seeds."""

    def save(self, seeds: Sequence[int]) -> Found:
        """Run it and keep the figures."""
        found = self.run(seeds)
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"seeds": list(seeds), **asdict(found)}, indent=1)
        (RESULTS / f"{self.number}.json").write_text(text + "\n", encoding="utf-8")
        return found


# The data and the model


@functools.cache
def digits(train: bool) -> TensorDataset:
    """Handwritten digits that come with scikit-learn: 1,437 to train on, 360 to test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.data, dtype=torch.float32) / 16
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    chosen = order[TEST_SAMPLES:] if train else order[:TEST_SAMPLES]
    return TensorDataset(images[chosen], labels[chosen])


def perceptron() -> nn.Module:
    """A classifier of the digits."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a classifier."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def digits_job(**changes: Any) -> Job:
    """A job that learns the digits with SGD."""
    settings: dict[str, Any] = {
        "name": "digits",
        "model": perceptron,
        "loss": cross_entropy,
        "dataset": functools.partial(digits, True),
        "optimizer": "SGD",
        "batch_size": 32,
        "replicas": 1,
        "steps": 1500,
    }
    return Job(**{**settings, **changes})


@torch.no_grad()
def accuracy(params: Mapping[str, torch.Tensor]) -> float:
    """On the test images; that of guessing if the parameters are not finite."""
    model = perceptron()
    model.load_state_dict(dict(params))
    images, labels = digits(train=False).tensors
    return float((model(images).argmax(dim=1) == labels).double().mean())


# Runs


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The end of a training under the virtual clock."""

    params: Mapping[str, torch.Tensor]
    result: Result | None
    """None if a gradient was not finite: the training diverged."""


def train(
    job: Job, workers: int, *, cv: float = 0.1, seed: int = 0, watch: Callable[[Simulation], None] = lambda run: None
) -> Trained:
    """Train with virtual workers of Gamma distributed passes of mean 1 s. watch: called before the run."""
    torch.set_num_threads(1)
    spec = job.spec(job.build_model())
    setup = Setup(job=spec, workers=workers, times=(Gamma(1.0, cv),), seed=seed)
    contents = training_contents(job, setup)
    simulation = Simulation(setup, contents)
    watch(simulation)
    result: Result | None = None
    with contextlib.suppress(NonFiniteError):
        result = simulation.run()
    return Trained(params=parameters(contents.plan, simulation.servers, job.build_model()), result=result)


def timing(job: Job, workers: int, *, cv: float, seed: int = 0) -> Result:
    """Only the times of the same."""
    setup = Setup(job=job.spec(job.build_model()), workers=workers, times=(Gamma(1.0, cv),), seed=seed)
    return Simulation(setup).run()


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and range over the seeds, as text."""
    found = [value for value in values if math.isfinite(value)]
    if not found:
        return "diverged"
    mean = f"{sum(found) / len(found):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)
