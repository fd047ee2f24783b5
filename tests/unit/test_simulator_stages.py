"""Simulated pipelines: against closed forms, against the passes of the real runner, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.core.plan import make_plan
from shardline.core.spec import JobSpec
from shardline.data import BatchSource
from shardline.errors import JobError, UsageError
from shardline.job import Job
from shardline_lab.simulator import runs
from shardline_lab.simulator.gradients import training_contents
from shardline_lab.simulator.links import Network
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Death, Setup, StageCosts
from shardline_lab.simulator.stages import PipelineSimulation, simulated
from shardline_lab.simulator.times import Gamma
from shardline_pipeline import PIPELINES, bubble, schedule_named
from shardline_pipeline.base import StageLayout
from shardline_pipeline.model import Pipeline
from shardline_pipeline.partition.costs import Cluster, Costs, LinkLevel, PlannedStage
from shardline_pipeline.partition.forecast import forecast_of
from shardline_pipeline.partition.profile import Handed, Layer, Profile
from shardline_pipeline.runner import AtHome, StageRunner

FLUSHING = [one.name for one in PIPELINES if schedule_named(one.name).staged and schedule_named(one.name).flushes]
ASYNC = [one.name for one in PIPELINES if schedule_named(one.name).staged and not schedule_named(one.name).flushes]
SHAPES = [(1, 3), (2, 1), (2, 8), (4, 4), (5, 9)]


def job(pipeline: str, stages: int, microbatches: int, *, width: int = 16, replicas: int = 1) -> Job:
    return Job(
        model=lambda: Pipeline([nn.Linear(width, width) for _ in range(stages)], stages=list(range(1, stages))),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        dataset=TensorDataset(torch.zeros(200, width)),
        optimizer="SGD",
        optimizer_args={"lr": 0.1},
        batch_size=2,
        accumulate=microbatches,
        replicas=replicas,
        steps=40,
        pipeline=pipeline,
    )


def spec(*given: Any, **more: Any) -> JobSpec:
    made = job(*given, **more)
    return made.spec(made.build_model())


def simulate(of: JobSpec, workers: int, *means: float, costs: dict[str, Any] | None = None, **more: Any) -> Result:
    """With stages of so many seconds per microbatch, half of it forward."""
    stages = StageCosts(times=[Gamma(mean) for mean in means], forward=(0.5,), **(costs or {}))
    return PipelineSimulation(Setup(job=of, workers=workers, times=(), stages=stages, **more)).run()


@pytest.mark.parametrize("pipeline", FLUSHING)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_the_bubble_of_a_flush_is_the_formula(pipeline: str, stages: int, microbatches: int) -> None:
    found = simulate(spec(pipeline, stages, microbatches), stages, 2.0)
    assert [one.bubble for one in found.stages] == pytest.approx([bubble(stages, microbatches)] * stages, abs=1e-9)
    assert found.seconds == pytest.approx(40 * 2.0 * (microbatches + stages - 1))
    assert [one.held for one in found.stages] == [
        schedule_named(pipeline).held(stage, stages, microbatches) for stage in range(stages)
    ]
    assert found.staleness_max == 0


@pytest.mark.parametrize("pipeline", FLUSHING)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_recomputation_costs_a_forward_pass_per_microbatch(pipeline: str, stages: int, microbatches: int) -> None:
    found = simulate(spec(f"{pipeline}:recompute=true", stages, microbatches), stages, 2.0)
    # Half of the two seconds of a microbatch is its forward pass.
    assert found.seconds == pytest.approx(40 * 3.0 * (microbatches + stages - 1))


@pytest.mark.part(of=3)
@pytest.mark.parametrize("pipeline", ASYNC)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (4, 4), (5, 9)])
def test_without_a_flush_the_longest_stage_limits_the_rate(pipeline: str, stages: int, microbatches: int) -> None:
    means = [1.0] * stages
    means[stages // 2] = 1.5
    found = simulate(spec(pipeline, stages, microbatches), stages, *means, steps=150)
    # Filling and draining come once. Half of a pass is forward.
    each_s = 1.5 * (1.5 if schedule_named(pipeline).recompute else 1.0)
    assert found.steps_per_s == pytest.approx(1 / (each_s * microbatches), rel=0.02)
    version = schedule_named(pipeline).version
    full, layout = range(stages * microbatches, 2 * stages * microbatches), StageLayout.straight(stages, microbatches)
    for stage, one in enumerate(found.stages):
        expected = max(number // microbatches - version(number, stage, layout) for number in full)
        assert (one.held, one.behind) == (stages - stage, expected)


@pytest.mark.parametrize(("pipeline", "seconds"), [("double-buffer", 4.0), ("stash", 6.0), ("flush", 7.0)])
def test_parameters_are_on_their_way_while_passes_go_on(pipeline: str, seconds: float) -> None:
    # An exchange takes 2 s: double-buffer needs its parameters a step later, stash at once, for a microbatch that has
    # its whole way to go; and after a flush nothing else is to do.
    found = simulate(spec(pipeline, 2, 4), 2, 1.0, steps=200, exchange_s=2.0)
    assert found.seconds / 200 == pytest.approx(seconds, rel=0.02)


@pytest.mark.part(of=5)
@pytest.mark.parametrize("pipeline", [*FLUSHING, *ASYNC])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_any_number_of_replicas_and_workers_comes_to_the_end(pipeline: str, replicas: int, workers: int) -> None:
    of = spec(pipeline, 3, 4, replicas=replicas)
    network = Network(bytes_per_s=1e4, latency_s=0.01)
    costs = {"parcel_bytes": (100.0, 200.0, 0.0), "parcel_s": 0.001}
    found = simulate(of, workers, 0.1, 0.2, costs=costs, network=network, servers=2)
    again = simulate(of, workers, 0.1, 0.2, costs=costs, network=network, servers=2)
    assert found.figures() == again.figures()
    assert found.steps == 40
    # What all replicas compute in a step, in one after another.
    assert found.seconds >= 40 * replicas * 4 * (0.1 + 0.2 + 0.1) / workers
    if workers == 1:
        assert found.parcel_bytes == 0.0
        assert found.seconds >= 40 * replicas * 4 * 0.4


def test_stages_go_to_the_workers_that_the_model_names() -> None:
    def job_on(workers: list[Any]) -> JobSpec:
        made = job("flush", 3, 4, replicas=2)
        model = Pipeline([nn.Linear(16, 16) for _ in range(3)], stages=[1, 2], workers=workers)
        return dataclasses.replace(made, model=lambda: model).spec(model)

    alone = simulate(job_on([[0], [1], [0]]), 2, 0.1)
    assert [one.tasks for one in alone.stages] == [("worker/0",), ("worker/1",), ("worker/0",)]
    shared = simulate(job_on([1, 2, 1]), 4, 0.1, 0.2, 0.1)
    assert [one.tasks for one in shared.stages] == [("worker/0",), ("worker/1", "worker/2"), ("worker/3",)]
    # Two workers for the stage that takes twice as long: no worker has more to do than another.
    assert shared.computing > 0.6
    with pytest.raises(JobError, match=r"is for worker/2, but there are 2 workers"):
        simulate(job_on([1, 2, 1]), 2, 0.1)


def test_bytes_are_those_of_every_replicas_stages_and_of_each_parcel_both_ways() -> None:
    of = spec("flush", 3, 4, replicas=2)
    found = simulate(of, 6, 0.1, costs={"parcel_bytes": (100.0, 30.0, 0.0)}, servers=2)
    assert found.parcel_bytes == 40 * 2 * 4 * 2 * (100 + 30)
    values = 3 * (16 * 16 + 16) * 4
    assert 40 * 2 * values <= found.push_bytes < 40 * 2 * 2 * values
    assert found.pull_bytes == found.push_bytes


def test_a_step_over_a_slow_link_takes_its_bytes_and_its_parcels_time() -> None:
    of = spec("flush", 2, 1)
    whole = simulate(of, 2, 1.0, network=Network(bytes_per_s=1e3), costs={"parcel_bytes": (500.0,), "parcel_s": 0.25})
    # Two passes of half a second in each stage, two parcels; then the stages' parameters, to the server and back.
    nbytes = whole.push_bytes / 40
    assert whole.seconds / 40 == pytest.approx(2 * 1.0 + 2 * (0.5 + 0.25) + nbytes / 1e3 + nbytes / 2e3, rel=0.2)
    assert simulate(of, 2, 1.0, exchange_s=0.5).seconds == pytest.approx(40 * 2.0 + 39 * 0.5, abs=0.6)


def test_stages_are_measured_here_and_from_the_trace_of_a_run(tmp_path: Path) -> None:
    made = job("flush", 3, 4)
    model = made.build_model()
    costs = runs.measure_stages(made, model)
    assert len(costs.times) == 3 and all(0.0 < share < 1.0 for share in costs.forward)
    assert costs.parcel_bytes == costs.gradient_bytes == (2 * 16 * 4, 2 * 16 * 4, 0.0)
    half = runs.measure_stages(dataclasses.replace(made, codec_parcels="bf16"), model)
    assert half.parcel_bytes == half.gradient_bytes == (2 * 16 * 2, 2 * 16 * 2, 0.0)
    durations = {"forward": 2_000.0, "backward": 6_000.0}
    events = [
        {
            "ph": "X",
            "ts": 10_000.0 * (4 * step + 2 * stage) + (cat == "backward"),
            "dur": duration * (1 + stage),
            "cat": cat,
            "args": {"step": step, "replica": 0, "stage": stage, "microbatch": 0},
        }
        for step in range(6)
        for stage in range(2)
        for cat, duration in durations.items()
    ]
    for ran, whole_s, share in (("flush", 0.008, 1 / 4), ("flush:recompute=true", 0.006, 1 / 3)):
        text = json.dumps({"traceEvents": events, "otherData": {"pipeline": ran}})
        (tmp_path / "pipeline-trace.json").write_text(text)
        read = runs.read_stages(tmp_path, 2)
        assert [times.mean_s for times in read.times] == pytest.approx([whole_s, 2 * whole_s])
        assert read.forward == pytest.approx((share, share))
    with pytest.raises(UsageError, match="that run has passes of 2 stages, and the job has 3"):
        runs.read_stages(tmp_path, 3)
    (tmp_path / "pipeline-trace.json").write_text("{")
    with pytest.raises(UsageError, match="is no trace of a pipeline"):
        runs.read_stages(tmp_path, 2)
    with pytest.raises(UsageError, match=r"can't be read.*a run in stages has one"):
        runs.read_stages(tmp_path / "nothing", 2)


@pytest.mark.parametrize("pipeline", FLUSHING)
def test_a_worker_with_all_stages_computes_in_the_order_of_the_real_runner(pipeline: str) -> None:
    made = job(pipeline, 3, 4)
    model = made.build_model()
    assert isinstance(model, Pipeline)
    home = AtHome()
    StageRunner(model, made, BatchSource(made), schedule_named(pipeline), home).run(0, {0: range(3)})
    simulation = PipelineSimulation(
        Setup(job=spec(pipeline, 3, 4), workers=1, times=(), steps=1, stages=StageCosts(times=(Gamma(1.0),)))
    )
    simulation.run()
    virtual = [one.report for one in simulation.timeline.passes]
    assert [(one.stage, one.microbatch, one.back, one.held) for one in virtual] == [
        (one.stage, one.microbatch, one.back, one.held) for one in home.passes
    ]


def test_what_can_not_be_simulated_of_a_pipeline_is_refused_by_name() -> None:
    of, stages = spec("flush", 2, 2), StageCosts(times=(Gamma(1.0),))
    with pytest.raises(UsageError, match=r"pipeline flush: give the times of its stages"):
        simulated(Setup(job=of, workers=2, times=()))
    with pytest.raises(UsageError, match=r"deaths in pipeline flush can't be simulated"):
        simulated(Setup(job=of, workers=2, times=(), stages=stages, deaths=[Death(worker=0, at_s=1.0)]))
    with pytest.raises(UsageError, match=r"--gradients can't simulate pipeline flush"):
        training_contents(job("flush", 2, 2), Setup(job=of, workers=2, times=(), stages=stages))


def test_what_the_partitioner_predicts_without_a_flush_is_what_is_simulated() -> None:
    errors = []
    for seed in range(16):
        rng = random.Random(seed)
        stages, microbatches = rng.randint(2, 3), rng.choice([2, 3, 4])
        means, sizes = ([rng.choice(few) for _ in range(stages)] for few in ([0.5, 1.0, 2.0], [1, 10, 40]))
        parcels = [rng.choice([0.0, 5e5]) for _ in range(stages - 1)]
        name, rate = rng.choice(["stash", "double-buffer", "vertical-sync", "ftpipe"]), rng.choice([2e6, 8e6, 32e6])
        made = spec(name, stages, microbatches)
        made = dataclasses.replace(
            made,
            # Of 1 MB, 10 MB or 40 MB.
            tensors=tuple(
                dataclasses.replace(one, shape=(4000 * sizes[one.fragment], 64)) for one in made.tensors
                if len(one.shape) == 2
            ),
        )  # fmt: skip
        costs = {"parcel_bytes": (*parcels, 0.0)}
        found = simulate(made, stages, *means, costs=costs, network=Network(bytes_per_s=rate), servers=2, steps=20)
        seconds = (found.step_ends_s[-1] - found.step_ends_s[7]) / 12
        layers = [
            Layer(
                name=str(number), forward_s=mean / 2, backward_s=mean / 2, trained_bytes=4 * 4000 * 64 * size,
                handed=(Handed(dtype="uint8", shape=(int(bytes_),), needs_grad=True),),
            )
            for number, (mean, size, bytes_) in enumerate(zip(means, sizes, (*parcels, 0.0), strict=True))
        ]  # fmt: skip
        plan = make_plan(made.tensors, 2)
        predicted = Costs(
            profile=Profile(layers=tuple(layers), samples=1),
            cluster=Cluster(levels=(LinkLevel(count=stages, bytes_per_s=rate),), servers=2),
            schedule=schedule_named(name),
            microbatches=microbatches,
            bucket_bytes=max(4 * bucket.elements for shard in plan.shards for bucket in shard.buckets),
        )
        forecast = forecast_of(
            predicted, tuple(PlannedStage(first=number, end=number + 1, workers=(number,)) for number in range(stages))
        )
        errors.append(seconds / forecast.seconds - 1)
    # It is a bound: what stages exchange at the same time may have to wait longer for a server's link.
    assert min(errors) > -0.05 and max(errors) < 0.5, errors
    assert statistics.median(errors) < 0.15, errors
