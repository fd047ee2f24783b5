"""The memory that a plan predicts for a stage, beside that of the tensors that its passes really allocate."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from shardline.core.orders import PassReport
from shardline.data import BatchSource
from shardline.job import Job
from shardline.pipeline import PIPELINES, Unbroken
from shardline.pipeline.model import Pipeline
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.pipeline.partition import Cluster, Costs, LinkLevel, PlannedStage, shapes
from shardline.pipeline.runner import StageRunner
from shardline.pipeline.stream import StreamRunner

MICROBATCHES, SAMPLES, STEPS = 6, 64, 5
CUTS = [3, 6, 9]
PIPELINES_MEASURED = [
    "gpipe", "flush", "stash", "vertical-sync", "double-buffer", "no-stash", "ftpipe",
    "gpipe:recompute=true", "flush:recompute=true", "stash:recompute=true",
]  # fmt: skip


class Neighbours:
    """The other stages: what they send is always there, and made when it is taken, as if it had just come."""

    def __init__(self, activations: Sequence[torch.Size], pulled: Mapping[str, torch.Tensor]) -> None:
        """activations: shapes, by stage that they are for."""
        self._activations = activations
        self.pulled = pulled
        self._come: set[ParcelKey] = set()

    def send(self, parcel: Parcel) -> None: ...

    def here(self, key: ParcelKey) -> bool:
        return not key.back or key in self._come

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        # Gradients come as late as they can: all that does not need them is done by then.
        self._come.update(keys)

    def take(self, key: ParcelKey) -> Parcel:
        if key.back:
            return Parcel(key, (torch.zeros(self._activations[key.stage + 1]),), places=(0,))
        state = torch.get_rng_state().numpy().tobytes()
        return Parcel(key, (torch.zeros(self._activations[key.stage]),), (True,), (), state)

    def passed(self, report: PassReport) -> None: ...

    def settle(self) -> None: ...

    def staleness(self, stage: int, steps: int) -> None: ...


def layers() -> list[nn.Module]:
    return [
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10),
    ]  # fmt: skip


def make_job(pipeline: str) -> Job:
    data = TensorDataset(torch.randn(512, 1, 16, 16), torch.randint(0, 10, (512,)))
    return Job(
        model=lambda: Pipeline(layers(), stages=CUTS),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), dataset=data,
        optimizer="SGD", optimizer_args={"lr": 0.1}, batch_size=SAMPLES, accumulate=MICROBATCHES, steps=STEPS,
        pipeline=pipeline,
    )  # fmt: skip


def most_allocated(path: Path, run: Callable[[], None]) -> int:
    """Largest sum of the bytes of all tensors that are alive at a time, of those that are made while this runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    found.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())["traceEvents"]
    changes = sorted((one["ts"], one["args"]["Bytes"]) for one in trace if one["name"] == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def run_stage(job: Job, model: Pipeline, stage: int, neighbours: Neighbours) -> None:
    """Some steps of one stage."""
    schedule, source = PIPELINES.parse(job.pipeline), BatchSource(job)
    if isinstance(schedule, Unbroken):
        stream = StreamRunner(model, job, source, schedule, neighbours, pulled=lambda: neighbours.pulled, steps=STEPS)
        for step in range(STEPS):
            stream.begin(step, 0, {0: [stage]})
            stream.run()
        return
    runner = StageRunner(model, job, source, schedule, neighbours)
    for step in range(STEPS):
        runner.run(step, {0: [stage]})


@pytest.mark.parametrize("pipeline", PIPELINES_MEASURED)
def test_each_stage_needs_the_predicted_memory(pipeline: str, tmp_path: Path) -> None:
    job = make_job(pipeline)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    schedule = PIPELINES.parse(pipeline)
    cluster = Cluster(levels=(LinkLevel(count=model.num_stages),))
    costs = Costs(profile=shapes(model, job), cluster=cluster, schedule=schedule, microbatches=MICROBATCHES)
    ends = [0, *CUTS, len(model)]
    plan = tuple(
        PlannedStage(first=first, end=end, workers=(number,))
        for number, (first, end) in enumerate(itertools.pairwise(ends))
    )
    predicted = costs.forecast(plan).memory_bytes
    passed, given = [], torch.zeros(SAMPLES, 1, 16, 16)
    for stage in range(model.num_stages):
        passed.append(given.shape)
        given = model.run(stage, given).detach()
    for stage in range(model.num_stages):
        measured = measure_stage(job, stage, passed, tmp_path / "trace.json")
        assert measured == pytest.approx(predicted[stage], rel=0.03), f"stage {stage}"


def measure_stage(job: Job, stage: int, activations: Sequence[torch.Size], trace: Path) -> int:
    """Bytes of the stage's parameters, and of what its passes allocate."""
    model = job.build_model()
    assert isinstance(model, Pipeline)
    own = {name: value for name, value in model.state_dict().items() if model.stage_of_tensor(name) == stage}
    # Without a flush pulls fill tensors of their own, and the model has versions of these instead of its first values.
    neighbours = Neighbours(activations, {name: value.clone() for name, value in own.items()})
    there = sum(value.nbytes for value in own.values())
    return there + most_allocated(trace, lambda: run_stage(job, model, stage, neighbours))
