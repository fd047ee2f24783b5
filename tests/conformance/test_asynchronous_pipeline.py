"""What every pipeline without a flush must do: those in the table."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.stage_memory import Neighbours
from shardline.core.orders import PassReport
from shardline.core.parcel import Parcel, ParcelKey
from shardline.data import BatchSource
from shardline.errors import InternalError, JobError
from shardline.job import Job
from shardline.seams import settings_of
from shardline.testing import reference
from shardline_pipeline import (
    PIPELINES,
    DoubleBuffer,
    FTPipe,
    NoStash,
    Stash,
    VerticalSync,
    schedule_named,
)
from shardline_pipeline.base import StageLayout
from shardline_pipeline.hosts import Hosts, hosts_of
from shardline_pipeline.model import Pipeline
from shardline_pipeline.schedules.asynchronous import AsynchronousSchedule as Schedule
from shardline_pipeline.schedules.gaps import Gaps, GradientRun
from shardline_pipeline.staged import StagedModel
from shardline_pipeline.stream import ParameterSource, StageCounts, StreamRunner
from shardline_pipeline.timeline import Timeline
from tests.conformance.test_pipeline import (
    HOSTS,
    drifting_layers,
    job_of,
    plain_layers,
    several_layers,
    skips,
    turned_layers,
    wide_layers,
    words,
)
from tests.support.asynchronous_stages import Desk, Server, Shared
from tests.support.pipelines import run_workers, stages_of

ASYNC = [found for one in PIPELINES if isinstance(found := schedule_named(one.name), Schedule)]
EACH = pytest.mark.parametrize("schedule", ASYNC, ids=str)
PREDICTING = pytest.mark.parametrize("schedule", [one for one in ASYNC if "predict" in settings_of(type(one))], ids=str)
EACH_RUN = pytest.mark.parametrize("schedule", [*ASYNC, Stash(recompute=True)], ids=str)


def run(schedule: Schedule, job: Job, history: Callable[[int], int] = lambda step: 0) -> tuple[Server, list[float]]:
    """Train with all stages in one runner. history(step): the timeline of a step."""
    server, model = Server(job), job.build_model()
    assert isinstance(model, StagedModel)
    runner = StreamRunner(
        model,
        job,
        BatchSource(job),
        schedule,
        server,
        ParameterSource(
            pulled=lambda: server.pulled,
            predict=server.predict,
            gaps=lambda: Gaps(job.spec(job.build_model())),
        ),
        steps=job.steps,
    )
    losses = []
    for step in range(job.steps):
        if step and history(step) != history(step - 1):
            # Parcels of another timeline are not for this one.
            server.clear()
        runner.begin(step, history(step), {0: tuple(range(model.num_stages))})
        part = runner.run()[0]
        assert part.loss is not None
        losses.append(part.loss)
        server.step(dict(part.gradients), dict(part.buffers))
    return server, losses


def table(layout: StageLayout, steps: int) -> dict[tuple[int, int], int]:
    """Updates that a stage's worker has had when each microbatch goes forward, by stage and number.

    Every worker has PipeDream's order, with floor((W - 1 - workers of earlier stages) / workers of its own) forward
    passes first. Backward passes take twice as long. An update is there when all workers of the stage have gone back
    with their part of a step, and a forward pass waits until it is.
    """
    order: dict[tuple[int, int], deque[tuple[int, bool]]] = {}
    total = layout.first(steps)
    for stage, workers in enumerate(layout.workers):
        lead = (sum(layout.workers) - 1 - sum(layout.workers[:stage])) // workers
        for worker in range(workers):
            own = range(worker, total, workers)
            todo = order[stage, worker] = deque((number, False) for number in own[:lead])
            for place, number in enumerate(own):
                if place + lead < len(own):
                    todo.append((own[place + lead], False))
                todo.append((number, True))
    ended: dict[tuple[int, int, bool], int] = {}
    free = dict.fromkeys(order, 0)
    gone = dict.fromkeys(order, 0)
    found: dict[tuple[int, int], int] = {}
    while any(order.values()):
        ready = []
        for (stage, worker), todo in order.items():
            if not todo:
                continue
            number, back = todo[0]
            near = stage + 1 if back else stage - 1
            own = ended.get((stage, number, False), 0) if back else 0
            updates = gone[stage, worker] // layout.share(stage)
            needed = [(stage, one, True) for one in range(layout.first(updates))]
            come = near in (-1, layout.stages) or (near, number, back) in ended
            if come and all(one in ended for one in needed):
                ready.append((max(free[stage, worker], own, ended.get((near, number, back), 0)), stage, worker))
        assert ready, f"{layout} stands still"
        start, stage, worker = min(ready)
        number, back = order[stage, worker].popleft()
        if not back:
            found[stage, number] = gone[stage, worker] // layout.share(stage)
        gone[stage, worker] += back
        free[stage, worker] = ended[stage, number, back] = start + (2 if back else 1)
    return found


def layouts(*microbatches: int) -> list[StageLayout]:
    """Straight ones, and stages with several workers, or workers with several replicas."""
    shapes = [(1, (1,) * stages) for stages in (1, 2, 3, 4, 5)]
    shapes += [(2, (2, 1, 1)), (2, (1, 1, 1)), (4, (1, 2, 1)), (15, (15, 1)), (6, (1, 3, 2, 6)), (4, (2, 2, 4, 1, 1))]
    return [
        StageLayout(workers=workers, microbatches=count, replicas=replicas)
        for replicas, workers in shapes
        for count in microbatches
    ]


@pytest.mark.parametrize("layout", layouts(1, 2, 5), ids=str)
def test_stashed_versions_are_those_that_the_passes_order_leads_to(layout: StageLayout) -> None:
    for (stage, number), updates in table(layout, 8).items():
        assert Stash().version(number, stage, layout) == updates


def versions_used(schedule: Schedule, stage: int, layout: StageLayout) -> int:
    """Largest number of versions of its parameters that a worker uses at a time, in a full pipeline."""
    if schedule.keeps_one:
        return 1
    most, each, full = 0, layout.workers[stage], 2 * sum(layout.workers) * layout.share(stage)
    for oldest in range(full, full + layout.share(stage)):
        span = range(oldest, oldest + layout.ahead(stage) + 1)
        most = max(most, len({schedule.version(one * each, stage, layout) for one in span}))
    return most


@pytest.mark.part(of=3, first=1)
@EACH
@pytest.mark.parametrize("layout", layouts(4, 5), ids=str)
def test_no_pass_needs_a_version_that_its_stage_does_not_have_yet(schedule: Schedule, layout: StageLayout) -> None:
    for (stage, number), updates in table(layout, 4).items():
        assert schedule.version(number, stage, layout) <= updates


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_versions_staleness_and_stashes_are_those_of_the_paper(stages: int) -> None:
    """PipeDream, section 3.3; minibatches counted from 1 there."""
    stash, vertical, double = Stash(), VerticalSync(), DoubleBuffer()
    straight, eight = StageLayout.straight(stages, 1), StageLayout.straight(stages, 8)
    for stage in range(stages):
        for minibatch in range(1, 41):
            version = stash.version(minibatch - 1, stage, straight)
            assert version == max(0, minibatch - stages + stage)
            assert minibatch - 1 - version == min(minibatch - 1, stages - 1 - stage)
            assert vertical.version(minibatch - 1, stage, straight) == max(0, minibatch - stages)
            assert double.version(minibatch * 8, stage, eight) == minibatch - 1
            for one in (NoStash(), FTPipe()):
                assert one.version(minibatch - 1, stage, straight) == version
                assert one.back_version(minibatch - 1, stage, straight) == minibatch - 1
        assert versions_used(stash, stage, straight) == straight.held(stage) == stages - stage
        assert versions_used(NoStash(), stage, straight) == versions_used(FTPipe(), stage, straight) == 1
        assert versions_used(double, stage, StageLayout.straight(stages, max(1, stages - 1))) <= 2


@pytest.mark.parametrize(
    ("workers", "replicas", "ahead", "held"),
    [
        ((2, 1, 1), 2, [1, 1, 0], [2, 1, 1]),
        ((15, 1), 15, [1, 0], [2, 1]),
        ((7, 1), 7, [1, 0], [2, 1]),
        ((1, 1, 1, 1), 1, [3, 2, 1, 0], [4, 3, 2, 1]),
        ((1, 1, 1), 2, [2, 1, 0], [2, 1, 1]),
        ((2, 2, 2), 2, [2, 1, 0], [3, 2, 1]),
        ((1, 2, 1), 4, [3, 1, 0], [1, 1, 1]),
    ],
)
def test_workers_of_replicated_stages_are_ahead_as_in_pipedream_s_runtime(
    workers: tuple[int, ...], replicas: int, ahead: list[int], held: list[int]
) -> None:
    layout, stages = StageLayout(workers=workers, microbatches=1, replicas=replicas), range(len(workers))
    assert [layout.ahead(stage) for stage in stages] == ahead
    assert [layout.held(stage) for stage in stages] == held
    # NOAM, the minibatches in flight for each of the first stage's workers.
    assert layout.ahead(0) + 1 == -(-sum(workers) // workers[0])


UNDELAYED: dict[str, str] = {}
"""Digests of plain training, which is the same for every schedule."""


def undelayed(layers: Callable[[], list[nn.Module]], cuts: list[int], fields: dict[str, object]) -> str:
    key = f"{layers.__name__} {cuts} {fields}"
    if key not in UNDELAYED:
        UNDELAYED[key] = reference(job_of(layers, cuts, steps=9, **fields)).sha256
    return UNDELAYED[key]


@pytest.mark.part(of=13)
@pytest.mark.usefixtures("traced_once")
@EACH_RUN
@pytest.mark.parametrize(
    ("layers", "cuts", "fields"),
    [
        pytest.param(plain_layers, [], {}, id="one stage"),
        pytest.param(plain_layers, [1, 4], {}, id="dropout and batch norm"),
        pytest.param(plain_layers, [1, 4, 5], {"optimizer": "Adam", "optimizer_args": {"lr": 0.01}}, id="four stages"),
        pytest.param(turned_layers, [2, 3], {"accumulate": 2}, id="an activation that is a view"),
        pytest.param(several_layers, [2, 3, 4], {}, id="several tensors, some twice, some unused"),
        pytest.param(drifting_layers, [1, 3], {}, id="buffers that passes use and change"),
        pytest.param(skips, [], {"accumulate": 4}, id="traced, with skip connections"),
        pytest.param(words, [], {}, id="traced, with tied weights"),
        pytest.param(wide_layers, [1, 2, 3], {"codec_parcels": "int8"}, id="int8 between stages"),
        pytest.param(words, [], {"codec_parcels": "bf16"}, id="bf16 between traced stages"),
    ],
)
def test_training_has_the_bits_of_one_process_with_that_delay(
    schedule: Schedule, layers: Callable[[], list[nn.Module]], cuts: list[int], fields: dict[str, object]
) -> None:
    job = job_of(layers, cuts, steps=9, pipeline=schedule, **fields)
    expected = reference(job)
    server, losses = run(schedule, job)
    stages = server.model.num_stages
    assert isinstance(stages, int)
    layout = StageLayout.straight(stages, job.accumulate)
    assert losses == list(expected.losses)
    for name, values in {**expected.params, **expected.buffers}.items():
        assert torch.equal(server.pulled[name], values), name
    for one in server.passes:
        number = one.step * job.accumulate + one.microbatch
        version = schedule.back_version if one.back else schedule.version
        assert one.version == version(number, one.stage, layout)
        assert one.held <= layout.held(one.stage)
    if stages > 2:
        assert expected.sha256 != undelayed(layers, cuts, fields)


@EACH
def test_one_stage_is_plain_training_unless_steps_are_delayed(schedule: Schedule) -> None:
    job, plain = (job_of(plain_layers, [], steps=6, pipeline=name) for name in (schedule, "whole-model"))
    assert (reference(job).sha256 == reference(plain).sha256) is (schedule.name != "double-buffer")


@EACH
def test_a_new_timeline_begins_with_an_empty_pipeline(schedule: Schedule) -> None:
    job = job_of(plain_layers, [1, 4], steps=10, pipeline=schedule)
    server, _ = run(schedule, job, lambda step: step // 5)
    expected = reference(job, start=reference(job, 5))
    for name, values in expected.params.items():
        assert torch.equal(server.pulled[name], values), name


class Interrupting(Server):
    """Raises once, in the middle of a step."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.left = 8

    def take(self, key: ParcelKey) -> Parcel:
        self.left -= 1
        if not self.left:
            raise JobError("interrupted")
        return super().take(key)


@pytest.mark.part(of=3)
@EACH_RUN
@pytest.mark.parametrize("after", [3, 8, 13, 20])
def test_nothing_is_left_of_a_step_that_was_left_in_the_middle(schedule: Schedule, after: int) -> None:
    job = job_of(plain_layers, [1, 4], steps=6, pipeline=schedule)
    server, model = Interrupting(job), job.build_model()
    server.left = after
    assert isinstance(model, Pipeline)
    runner = StreamRunner(
        model, job, BatchSource(job), schedule, server, ParameterSource(pulled=lambda: server.pulled), steps=job.steps
    )
    runner.begin(0, 0, {0: (0, 1, 2)})

    def some_steps() -> None:
        for step in range(3):
            runner.begin(step, 0, {0: (0, 1, 2)})
            runner.run()

    with pytest.raises(JobError, match="interrupted"):
        some_steps()
    server.clear()
    for step in range(6):
        runner.begin(step, 1, {0: (0, 1, 2)})
        part = runner.run()[0]
        server.step(dict(part.gradients), dict(part.buffers))
    expected = reference(job)
    for name, values in {**expected.params, **expected.buffers}.items():
        assert torch.equal(server.pulled[name], values), name


@EACH
def test_the_staleness_that_it_tells_is_the_schedule_s(schedule: Schedule) -> None:
    job = job_of(plain_layers, [1, 4], steps=8, pipeline=schedule)
    server, _ = run(schedule, job)
    last = dict(server.stale[-3:])
    expected: Sequence[int] = {
        "stash": [1, 1, 0],
        "vertical-sync": [1, 1, 1],
        "double-buffer": [1, 1, 1],
        "ftpipe": [1, 1, 0],
        "no-stash": [1, 1, 0],
    }[schedule.name]
    assert [last[stage] for stage in range(3)] == list(expected)
    single = job_of(plain_layers, [1, 4], steps=8, pipeline=schedule, accumulate=2)
    server, _ = run(schedule, single)
    assert max(steps for _, steps in server.stale) == 1


def test_too_few_microbatches_for_two_versions_are_refused() -> None:
    job = job_of(plain_layers, [1, 4, 5], pipeline="double-buffer", accumulate=2)
    with pytest.raises(JobError, match="at least 3 microbatches per step for 4 stages, but accumulate is 2"):
        job.spec(job.build_model())


# Several workers


@pytest.mark.part(of=11)
@EACH_RUN
@pytest.mark.parametrize("codec", ["", "int8:stochastic=true"])
@pytest.mark.parametrize(("workers", "replicas"), HOSTS)
def test_whoever_has_which_stages_the_bits_are_those_of_one_process_with_that_delay(
    schedule: Schedule, workers: list[int | list[int]], replicas: int, codec: str
) -> None:
    layers, cuts = (wide_layers, [1, 2]) if codec else (plain_layers, [1, 4])
    fields = {"replicas": replicas, "steps": 6, "pipeline": schedule, "codec_parcels": codec}
    hosts = hosts_of(workers, len(cuts) + 1)
    if not codec:
        # A pipeline for each replica, since the job names no workers.
        assert_bits_of_one_process(schedule, job_of(layers, cuts, **fields), hosts)
    assert_bits_of_one_process(schedule, job_on(hosts, layers, cuts, **fields), hosts)


@pytest.mark.part(of=7)
@pytest.mark.parametrize("schedule", [one for one in ASYNC if one.name != "double-buffer"], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("workers", "replicas"),
    [([[0], [1], [2], [3]], 1), ([2, 1, 1, 1], 2), ([[0], [1]] * 2, 2), ([1, 3, 2, 1], 6)],
)
def test_so_they_are_with_fewer_microbatches_than_a_stage_is_ahead(
    schedule: Schedule, microbatches: int, workers: list[int | list[int]], replicas: int
) -> None:
    fields = {"replicas": replicas, "accumulate": microbatches, "steps": 7, "pipeline": schedule}
    hosts = hosts_of(workers, 4)
    if replicas <= 2:
        assert_bits_of_one_process(schedule, job_of(plain_layers, [1, 4, 5], **fields), hosts)
    assert_bits_of_one_process(schedule, job_on(hosts, plain_layers, [1, 4, 5], **fields), hosts)


@pytest.mark.part(of=3, first=2)
@pytest.mark.parametrize("schedule", [one for one in ASYNC if one.name != "double-buffer"], ids=str)
@pytest.mark.parametrize("actual", [[[0], [1], [0]], [[0], [0], [0]], [[1, 0], [2], [2]], [[0, 0], [1], [1]]], ids=str)
def test_versions_are_those_of_the_declared_workers_whoever_stands_in_for_them(
    schedule: Schedule, actual: list[list[int]]
) -> None:
    declared = hosts_of([2, 1, 1], 3)
    job = job_on(declared, plain_layers, [1, 4], replicas=2, accumulate=1, steps=7, pipeline=schedule)
    assert_bits_of_one_process(schedule, job, tuple(map(tuple, actual)))
    plain = job_of(plain_layers, [1, 4], replicas=2, accumulate=1, steps=7, pipeline=schedule)
    assert reference(job).sha256 != reference(plain).sha256


@pytest.mark.parametrize("schedule", [Stash(), VerticalSync(), DoubleBuffer()], ids=str)
def test_no_more_is_in_flight_than_the_layout_says(schedule: Schedule) -> None:
    """2-1-1: two microbatches for each worker of the first stage, two in the second stage, one in the last."""
    hosts = hosts_of([2, 1, 1], 3)
    job = job_on(hosts, plain_layers, [1, 4], replicas=2, steps=6, pipeline=schedule)
    passes = assert_bits_of_one_process(schedule, job, hosts)
    held: dict[tuple[int, int], int] = {}
    most: dict[tuple[int, int], int] = {}
    for one in passes:
        place = one.stage, one.replica if one.stage == 0 else 0
        held[place] = held.get(place, 0) + (-1 if one.back else 1)
        most[place] = max(most.get(place, 0), held[place])
    assert most == {(0, 0): 2, (0, 1): 2, (1, 0): 2, (2, 0): 1}


def job_on(hosts: Hosts, layers: Callable[[], list[nn.Module]], cuts: list[int], **fields: object) -> Job:
    """A job that names the workers of its stages."""

    def model() -> nn.Module:
        return Pipeline(layers(), stages=cuts, workers=hosts)

    return replace(job_of(layers, cuts, **fields), model=model)


def assert_bits_of_one_process(schedule: Schedule, job: Job, hosts: Hosts) -> list[PassReport]:
    """Train with these workers, and compare; returns the passes in their order."""
    replicas, shared = job.replicas, Shared(job, len(hosts))

    def work(number: int) -> None:
        model, stages = job.build_model(), stages_of(hosts, replicas, number)
        desk = Desk(shared, stages)
        runner = StreamRunner(
            model,  # type: ignore[arg-type]
            job,
            BatchSource(job),
            schedule,
            desk,
            ParameterSource(pulled=lambda: desk.pulled, gaps=lambda: Gaps(job.spec(job.build_model()))),
            steps=job.steps,
        )
        for step in range(job.steps):
            desk.step = step
            runner.begin(step, 0, stages)
            shared.contribute(step, stages, runner.run())

    run_workers(hosts, shared.turn, work)
    expected = reference(job)
    for name, values in {**expected.params, **expected.buffers}.items():
        assert torch.equal(shared.tensors[name], values), name
    return shared.passes


class Late(Neighbours):
    """Parameters that come after all parcels for which a stage asks."""

    passes = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.settled: list[int] = []
        """Passes that were done when the stage asked for parameters."""

    def comes_first(self, keys: Sequence[ParcelKey]) -> bool:
        self.wait(keys)
        return bool(keys)

    def passed(self, report: PassReport) -> None:
        self.passes += 1

    def settle(self) -> None:
        self.settled.append(self.passes)


@EACH
def test_a_stage_computes_what_it_can_while_its_parameters_are_on_their_way(schedule: Schedule) -> None:
    stages, count, steps = 3, 4, 6
    job = job_of(plain_layers, [1, 4], accumulate=count, steps=steps, pipeline=schedule)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    shapes, given = [], BatchSource(job).batch(0, 0, 0)[0]
    for stage in range(stages):
        shapes.append(given.shape)
        given = model.run(stage, given).detach()
    late = Late(shapes, {name: one.detach().clone() for name, one in model.state_dict().items()})
    parameters = ParameterSource(pulled=lambda: late.pulled, predict=lambda stage, steps_late: late.pulled)
    runner = StreamRunner(model, job, BatchSource(job), schedule, late, parameters, steps=steps)
    done = []
    for step in range(steps - 1):
        runner.begin(step, 0, {0: [0]})
        runner.run()
        done.append(late.passes)
    # Stage 0 of three has two microbatches on their way, whose backward passes need no newer version, and with
    # double-buffer a whole step.
    most = {"double-buffer": 2 * count, "stash": 2, "vertical-sync": 2}.get(schedule.name, 0)
    assert [before - after for before, after in zip(late.settled[2:], done[1:], strict=False)] == [most] * (steps - 3)


MOMENTUM = {"optimizer_args": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}}
ADAM = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01}}


@pytest.mark.part(of=3, first=1)
@PREDICTING
@pytest.mark.parametrize("fields", [MOMENTUM, ADAM, {**MOMENTUM, "accumulate": 3}], ids=["momentum", "adamw", "m=3"])
def test_predicted_training_has_the_bits_of_one_process(schedule: Schedule, fields: dict[str, object]) -> None:
    plain = job_of(plain_layers, [1, 4], steps=9, pipeline=schedule, apply="worker", **fields)
    job = job_of(plain_layers, [1, 4], steps=9, pipeline=replace(schedule, predict=True), apply="worker", **fields)
    expected = reference(job)
    server, losses = run(replace(schedule, predict=True), job)
    assert losses == list(expected.losses)
    for name, values in expected.params.items():
        assert torch.equal(server.pulled[name], values), name
    assert expected.sha256 != reference(plain).sha256


@PREDICTING
def test_without_momentum_or_decay_there_is_nothing_to_predict(schedule: Schedule) -> None:
    fields = {"steps": 9, "apply": "worker", "optimizer_args": {"lr": 0.02}}
    plain, ahead = (
        job_of(plain_layers, [1, 4], pipeline=one, **fields) for one in (schedule, replace(schedule, predict=True))
    )
    assert reference(ahead).sha256 == reference(plain).sha256


@PREDICTING
def test_predictions_are_for_the_updates_that_a_gradient_will_have_missed(schedule: Schedule) -> None:
    for layout in layouts(4, 5):
        for stage in range(layout.stages):
            numbers = range(layout.first(7), layout.first(20))
            own = [number for number in numbers if schedule.version(number, stage, layout) == 7]
            assert schedule.late(7, stage, layout) == {layout.step(number) - 7 for number in own}
    assert Stash().late(7, 1, StageLayout.straight(4, 1)) == {2}
    assert Stash().late(0, 0, StageLayout.straight(4, 1)) == {0, 1, 2, 3}


GAPS = pytest.mark.parametrize("schedule", [one for one in ASYNC if "gap_aware" in settings_of(type(one))], ids=str)


@pytest.mark.part(of=3)
@GAPS
@pytest.mark.parametrize(
    "fields",
    [{"accumulate": 1}, MOMENTUM, {**ADAM, "accumulate": 5}, {"optimizer_args": {"lr": 0.02, "maximize": True}}],
    ids=["m=1", "momentum and decay", "adamw, m=5", "maximize"],
)
def test_gap_aware_training_has_the_bits_of_one_process(schedule: Schedule, fields: dict[str, object]) -> None:
    if schedule == DoubleBuffer():
        fields = {**fields, "accumulate": 3}
    aware = replace(schedule, gap_aware=True)
    plain, job = (job_of(plain_layers, [1, 4], steps=9, pipeline=one, **fields) for one in (schedule, aware))
    expected = reference(job)
    server, losses = run(aware, job, lambda step: 0)
    assert losses == list(expected.losses)
    for name, values in expected.params.items():
        assert torch.equal(server.pulled[name], values), name
    assert expected.sha256 != reference(plain).sha256
    # Where the pipeline is empty, the mean of the steps begins anew.
    server, _ = run(aware, job, lambda step: step // 5)
    again = reference(job, start=reference(job, 5))
    for name, values in again.params.items():
        assert torch.equal(server.pulled[name], values), name


@pytest.mark.part(of=3, first=1)
@pytest.mark.parametrize("schedule", [Stash(gap_aware=True), VerticalSync(gap_aware=True)], ids=str)
@pytest.mark.parametrize(("workers", "replicas"), [([2, 1, 1], 2), ([1, 1, 1], 2), ([1, 2, 1], 4)])
def test_gaps_of_several_replicas_count_before_they_are_added(
    schedule: Schedule, workers: list[int], replicas: int
) -> None:
    hosts = hosts_of(workers, 3)
    job = job_on(hosts, plain_layers, [1, 4], replicas=replicas, steps=6, pipeline=schedule, **MOMENTUM)
    assert_bits_of_one_process(schedule, job, hosts)


@pytest.mark.parametrize("others", [{"predict": True}, {"recompute": True}, {"predict": True, "recompute": True}])
def test_mitigations_can_be_combined(others: dict[str, bool]) -> None:
    schedule = Stash(gap_aware=True, **others)
    fields = {**MOMENTUM, "apply": "worker", "accumulate": 2}
    job = job_of(plain_layers, [1, 4, 5], steps=9, pipeline=schedule, **fields)
    server, _ = run(schedule, job)
    expected = reference(job)
    for name, values in expected.params.items():
        assert torch.equal(server.pulled[name], values), name
    for name in others:
        if name == "predict":
            assert expected.sha256 != reference(replace(job, pipeline=replace(schedule, predict=False))).sha256


def test_a_gradient_is_divided_by_its_own_gap_in_average_steps() -> None:
    """By hand: three steps, of which the mean takes 1 - 0.999 each; weight decay is divided too."""
    job = job_of(plain_layers, [1, 4], pipeline="stash:gap_aware=true", optimizer_args={"lr": 0.1, "weight_decay": 0.5})
    gaps, name = Gaps(job.spec(job.build_model())), "5.bias"
    history = [torch.tensor(values) for values in ([1.0, 2.0], [0.8, 2.1], [0.5, 2.1])]
    old, new = {name: torch.tensor([2.0, -3.0])}, {name: torch.tensor([0.5, 0.25])}
    parts = [GradientRun(old, {name: history[0]}, 0.75), GradientRun(new, None, 0.25)]
    assert torch.equal(gaps.mitigated(0, parts, {name: history[0]})[name], torch.tensor([2.5, -2.75]))
    for step in range(2):
        gaps.moved(step, {name: history[step]}, {name: history[step + 1]})
    squares = [(((a - b) / 0.1) ** 2).double() for a, b in itertools.pairwise(history)]
    mean = (0.001 * squares[1] + 0.999 * 0.001 * squares[0]) / (1 - 0.999**2)
    penalty = 1 + (history[2] - history[0]).abs().double() / (0.1 * (mean.sqrt() + 1e-8))
    expected = (old[name] + 0.75 * 0.5 * history[2]) / penalty - 0.75 * 0.5 * history[2] + new[name]
    found = gaps.mitigated(2, parts, {name: history[2]})[name]
    assert torch.allclose(found.double(), expected.double(), rtol=1e-4)


@pytest.mark.parametrize("pipeline", ["ftpipe:gap_aware=true", "no-stash:gap_aware=true"])
def test_a_schedule_that_keeps_one_version_has_no_gap(pipeline: str) -> None:
    with pytest.raises(JobError, match="has no setting 'gap_aware'"):
        schedule_named(pipeline)


def test_parameters_that_others_move_meanwhile_have_no_gap() -> None:
    job = job_of(plain_layers, [1, 4], replicas=2, pipeline="stash:gap_aware=true", consistency="async")
    with pytest.raises(JobError, match="other replicas move them meanwhile; choose consistency='sync'"):
        job.spec(job.build_model())
    # Without slack it is synchronous.
    replace(job, consistency="ssp:slack=0").spec(job.build_model())


def test_gradients_of_which_only_the_sign_counts_have_no_gap() -> None:
    job = job_of(plain_layers, [1, 4], pipeline="stash:gap_aware=true", optimizer="Rprop", optimizer_args={"lr": 0.01})
    with pytest.raises(
        JobError, match="but Rprop takes only their signs; use another optimizer, or leave gap_aware out"
    ):
        job.spec(job.build_model())


def test_predictions_without_the_optimizer_s_state_are_refused() -> None:
    job = job_of(plain_layers, [1, 4], pipeline="stash:predict=true")
    with pytest.raises(JobError, match="no worker has; choose apply='worker', or leave predict out"):
        job.spec(job.build_model())


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        ("no-stash:predict=true", "no-stash has no setting 'predict'"),
        ("no-stash:recompute=true", "has no setting 're"),
        ("ftpipe:recompute=true", "has no setting 're"),
    ],
)
def test_what_a_schedule_can_not_do_is_refused(pipeline: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        schedule_named(pipeline)


def linear_layers() -> list[nn.Module]:
    return [nn.Linear(12, 6, bias=False), nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)]


def half_square(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return 0.5 * model(batch[0]).square().sum()


def by_hand(job: Job, *, repeats: bool) -> list[torch.Tensor]:
    """The weights of linear_layers() after five steps; the first of two stages goes forward with those of a step ago.

    repeats: a backward pass repeats its forward pass with the newest weights.
    """
    history = [[values.detach().double() for values in job.build_model().parameters()]]
    for step in range(5):
        given = BatchSource(job).batch(step, 0, 0)[0].double()
        (old_first, old_second, _), (first, second, last) = history[max(0, step - 1)], history[step]
        inner = given @ old_first.T
        made = inner @ old_second.T
        out = made @ last.T
        kept = given @ first.T if repeats else inner
        # Through the newest weights of the second layer, with which the first forward pass has computed nothing.
        gradients = (out @ last @ second).T @ given, (out @ last).T @ kept, out.T @ made
        history.append([one - 0.1 * gradient for one, gradient in zip(history[step], gradients, strict=True)])
    return history[-1]


@pytest.mark.parametrize("schedule", [NoStash(), FTPipe()], ids=str)
def test_a_backward_pass_with_newer_weights_is_what_it_is_by_hand(schedule: Schedule) -> None:
    fields = {"batch_size": 2, "accumulate": 1, "steps": 5}
    job = replace(job_of(linear_layers, [2], pipeline=schedule, **fields), loss=half_square)
    server, _ = run(schedule, job)
    for number, values in enumerate(by_hand(job, repeats=schedule.recompute)):
        assert torch.allclose(server.pulled[f"{number}.weight"].double(), values, rtol=0, atol=1e-5)
    others = {reference(replace(job, pipeline=one)).sha256 for one in ("stash", "no-stash", "ftpipe")}
    assert len(others) == 3


# StageCounts


@pytest.mark.part(of=3)
@EACH
@pytest.mark.parametrize("microbatches", [3, 4])
def test_what_a_run_counts_is_what_the_paper_says(schedule: Schedule, microbatches: int) -> None:
    """PipeDream, section 3.3: per stage, from the passes of a run, staleness, versions and microbatches in progress."""
    job = job_of(plain_layers, [1, 4, 5], steps=12, pipeline=schedule, accumulate=microbatches)
    server, _ = run(schedule, job)
    figures = Timeline(4, 1, microbatches)
    figures.add("worker/0", server.passes)
    behind = {
        "stash": [1, 1, 1, 0],
        "ftpipe": [1, 1, 1, 0],
        "no-stash": [1, 1, 1, 0],
    }.get(schedule.name, [1, 1, 1, 1])
    assert [one.behind for one in figures.figures()] == behind
    # One worker has all stages here, and takes what is further behind first.
    held = [one.held for one in figures.figures()]
    assert held[0] == 4 and all(count <= 4 - stage for stage, count in enumerate(held))
    versions = [1] * 4 if schedule.keeps_one else [1 + one for one in behind]
    assert [one.versions for one in figures.figures()] == versions


@pytest.mark.parametrize("schedule", [Stash(), VerticalSync(), FTPipe(), NoStash()], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_counts_that_are_not_the_paper_s_are_told_with_stage_step_and_values(schedule: Schedule, stages: int) -> None:
    """One microbatch per step: minibatch m from 1 on, stage s of n."""
    for stage in range(stages):
        counts, kept = StageCounts(schedule, StageLayout.straight(stages, 1), 0), set[int]()
        ahead_by = stages - 1 - stage
        for step in range(12):
            late = stages - 1 if schedule == VerticalSync() else ahead_by
            kept = {step} if schedule.keeps_one else set(range(max(0, step - late), step + 1))
            with pytest.raises(InternalError, match=f"stage {stage} has got version {step} and keeps"):
                counts.arrived(stage, step, kept | {99})
            counts.arrived(stage, step, kept)
            # All that version lets go forward: in a full pipeline one microbatch.
            forward = max(0, step - late)
            held = min(step, ahead_by) + 1
            counts.passed(stage, step, forward, held, held, back=False)
            counts.passed(stage, step, step if schedule.keeps_one else forward, ahead_by + 1, ahead_by + 1, back=True)
            with pytest.raises(InternalError, match=f"stage {stage} has computed microbatch 0 of step {step} forward"):
                counts.passed(stage, step, forward + 1, 1, 1, back=False)
            with pytest.raises(InternalError, match=f"holding {ahead_by + 2} microbatches"):
                counts.passed(stage, step, forward, ahead_by + 2, ahead_by + 2, back=False)
        with pytest.raises(InternalError, match="has version 12 next"):
            counts.arrived(stage, 13, kept)
