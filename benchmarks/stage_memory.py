"""The memory that a stage of a pipeline really needs: its tensors, and those that its passes allocate."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardline.core.orders import PassReport
from shardline.core.parcel import Parcel, ParcelKey
from shardline.data import BatchSource
from shardline.job import Job
from shardline_pipeline import schedule_named
from shardline_pipeline.model import Pipeline
from shardline_pipeline.runner import StageRunner
from shardline_pipeline.schedules.gaps import Gaps
from shardline_pipeline.stream import ParameterSource, StreamRunner


class Neighbours:
    """The other stages: what they send is always there, and made when it is taken, as if it had just come."""

    def __init__(self, activations: Sequence[torch.Size], pulled: Mapping[str, torch.Tensor]) -> None:
        """activations: shapes, by stage that they are for."""
        self._activations = activations
        self.pulled = pulled
        self._come: set[ParcelKey] = set()

    def send(self, parcel: Parcel) -> None:
        """See ActivationChannel.send: nobody takes it."""

    def here(self, key: ParcelKey) -> bool:
        """See ActivationChannel.here."""
        return not key.back or key in self._come

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """Gradients come as late as they can: all that does not need them is done by then."""
        self._come.update(keys)

    def take(self, key: ParcelKey) -> Parcel:
        """See ActivationChannel.take."""
        if key.back:
            return Parcel(key, (torch.zeros(self._activations[key.stage + 1]),), places=(0,))
        state = torch.get_rng_state().numpy().tobytes()
        return Parcel(key, (torch.zeros(self._activations[key.stage]),), (True,), (), state)

    def passed(self, report: PassReport) -> None:
        """See ActivationChannel.passed: nobody looks."""

    def comes_first(self, keys: Sequence[ParcelKey]) -> bool:
        """See StageExchange.comes_first: parameters are there at once."""
        return False

    def settle(self) -> None:
        """See StageExchange.settle: there is nothing to wait for."""

    def staleness(self, stage: int, steps: int) -> None:
        """See StageExchange.staleness: nobody looks."""


def measured(job: Job, steps: int) -> list[int]:
    """Bytes by stage: its parameters, and the most that its passes have allocated at a time, in some steps.

    The job's model must be a Pipeline whose stages hand on one tensor each.
    """
    model = job.build_model()
    assert isinstance(model, Pipeline), "the job's model is made of layers"
    passed, given = [], BatchSource(job).batch(0, 0, 0)[0]
    for stage in range(model.num_stages):
        passed.append(given.shape)
        given = model.run(stage, given).detach()
    return [_of_stage(job, stage, passed, steps) for stage in range(model.num_stages)]


def _of_stage(job: Job, stage: int, activations: Sequence[torch.Size], steps: int) -> int:
    model = job.build_model()
    assert isinstance(model, Pipeline), "the job's model is made of layers"
    own = {name: value for name, value in model.state_dict().items() if model.stage_of_tensor(name) == stage}
    # Without a flush pulls fill tensors of their own, and the model has versions of these instead of its first values.
    neighbours = Neighbours(activations, {name: value.clone() for name, value in own.items()})
    there = sum(value.nbytes for value in own.values())
    return there + _most_allocated(lambda: _run(job, model, stage, neighbours, steps))


def _run(job: Job, model: Pipeline, stage: int, neighbours: Neighbours, steps: int) -> None:
    """Some steps of one stage."""
    schedule, source = schedule_named(job.pipeline), BatchSource(job)
    if not schedule.flushes:
        own = neighbours.pulled
        trained = {name for name, _ in model.named_parameters()} & own.keys()
        parameters = ParameterSource(
            pulled=lambda: own,
            predict=lambda stage, late: {name: own[name].clone() for name in trained},
            gaps=lambda: Gaps(job.spec(model)),
        )
        stream = StreamRunner(model, job, source, schedule, neighbours, parameters, steps=steps)
        for step in range(steps):
            stream.begin(step, 0, {0: [stage]})
            stream.run()
        return
    runner = StageRunner(model, job, source, schedule, neighbours)
    for step in range(steps):
        runner.run(step, {0: [stage]})


def _most_allocated(run: Callable[[], None]) -> int:
    """Largest sum of the bytes of all tensors that are alive at a time, of those that are made while this runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    with tempfile.TemporaryDirectory(prefix="shardline-memory-") as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((one["ts"], one["args"]["Bytes"]) for one in trace if one["name"] == "[memory]")
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
