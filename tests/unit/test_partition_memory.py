"""The memory that a plan predicts for a stage, beside that of the tensors that its passes really allocate."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.stage_memory import measured
from shardline.job import Job
from shardline_pipeline import schedule_named
from shardline_pipeline.model import Pipeline
from shardline_pipeline.partition.costs import Cluster, Costs, LinkLevel, PlannedStage
from shardline_pipeline.partition.forecast import forecast_of
from shardline_pipeline.partition.measure import shapes

MICROBATCHES, SAMPLES, STEPS = 6, 64, 5
CUTS = [3, 6, 9]
LATE = [
    "stash:predict=true", "double-buffer:predict=true", "stash:gap_aware=true", "vertical-sync:gap_aware=true",
    "double-buffer:predict=true,gap_aware=true",
]  # fmt: skip
"""What they need is predicted to be needed at one moment."""
PIPELINES_MEASURED = [
    "gpipe", "flush", "stash", "vertical-sync", "double-buffer", "no-stash", "ftpipe",
    "gpipe:recompute=true", "flush:recompute=true", "stash:recompute=true",
]  # fmt: skip


def layers() -> list[nn.Module]:
    return [
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10),
    ]  # fmt: skip


class Block(nn.Module):
    """Makes much that no other layer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = values + self.second(torch.relu(self.first(self.norm(values))))
        return made


def blocks() -> list[nn.Module]:
    start = nn.Sequential(nn.Flatten(), nn.Linear(256, 256), nn.ReLU(inplace=True), Block())
    return [start, Block(), nn.Sequential(Block(), Block()), nn.Sequential(Block(), nn.Linear(256, 10))]


def make_job(pipeline: str, made: list[nn.Module], cuts: list[int]) -> Job:
    data = TensorDataset(torch.randn(512, 1, 16, 16), torch.randint(0, 10, (512,)))
    return Job(
        model=lambda: Pipeline(copy.deepcopy(made), stages=cuts),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), dataset=data,
        optimizer="SGD", optimizer_args={"lr": 0.1}, batch_size=SAMPLES, accumulate=MICROBATCHES, steps=STEPS,
        pipeline=pipeline, apply="worker" if "predict" in pipeline else "server",
    )  # fmt: skip


@pytest.mark.part(of=5)
@pytest.mark.parametrize(
    ("pipeline", "made", "cuts", "within"),
    [(name, layers(), CUTS, 0.03) for name in PIPELINES_MEASURED]
    + [(name, layers(), CUTS, 0.07) for name in LATE]
    + [(name, blocks(), [1, 2, 3], 0.05) for name in ("flush", "stash", "gpipe:recompute=true")],
)
def test_each_stage_needs_the_predicted_memory(
    pipeline: str, made: list[nn.Module], cuts: list[int], within: float
) -> None:
    job = make_job(pipeline, made, cuts)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    schedule = schedule_named(pipeline)
    cluster = Cluster(levels=(LinkLevel(count=model.num_stages),))
    costs = Costs(profile=shapes(model, job), cluster=cluster, schedule=schedule, microbatches=MICROBATCHES)
    ends = [0, *cuts, len(model)]
    plan = tuple(
        PlannedStage(first=first, end=end, workers=(number,))
        for number, (first, end) in enumerate(itertools.pairwise(ends))
    )
    predicted = forecast_of(costs, plan).memory_bytes
    for stage, needed in enumerate(measured(job, STEPS)):
        assert needed == pytest.approx(predicted[stage], rel=within), f"stage {stage}"
