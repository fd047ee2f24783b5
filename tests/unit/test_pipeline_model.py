"""Models in stages: cuts, and what can't be cut. And which methods work with stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline_pipeline as pipeline
from shardline.core.parcel import pack, unpack
from shardline.data import seed_everything
from shardline.errors import JobError, JobExitError
from shardline.job import Job
from shardline_pipeline.model import Pipeline


def layers(*sizes: int) -> list[nn.Module]:
    """Layers of these numbers of parameters; 0 = an activation function."""
    return [nn.Linear(size - 1, 1) if size else nn.ReLU() for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "stages", "cuts"),
    [
        ((8, 8, 8, 8), 2, (2,)),
        ((8, 0, 8, 0, 8, 0, 8), 4, (2, 4, 6)),
        ((30, 2, 2, 2), 2, (1,)),
        ((2, 2, 2, 30), 2, (3,)),
        ((9, 3, 3, 9), 3, (1, 3)),
        ((5, 0), 1, ()),
        ((0, 5, 0, 5, 0), 2, (3,)),
    ],
)
def test_a_number_of_stages_makes_the_largest_one_as_small_as_it_can_be(
    sizes: Sequence[int], stages: int, cuts: tuple[int, ...]
) -> None:
    assert Pipeline(layers(*sizes), stages=stages).cuts == cuts


def shared() -> list[nn.Module]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return [first, nn.ReLU(), second]


@pytest.mark.parametrize(
    ("made", "stages", "sentence"),
    [
        (layers(4, 4), 3, "3 stages of 2 layers, of which 2 have parameters"),
        (layers(4, 4, 4), [1, 1], "1 does not begin a stage: give layers from 1 to 2, ascending"),
        (layers(4, 4, 4), [3], "3 does not begin a stage"),
        (layers(4, 4), [1, 2, 3], "4 stages of 2 layers"),
        (layers(4, 4), 0, "stages is 0; give a whole number >= 1"),
        (layers(4, 4), "auto:0", "stages is 'auto:0'; give \"auto:4\" for 4 stages"),
        (layers(4, 4), "best", "stages is 'best'; give \"auto:4\" for 4 stages"),
        (layers(4, 0, 4), [1, 2], r"stage 1, layer 1 \(ReLU\) to layer 1 \(ReLU\), has no parameters"),
        (
            shared(),
            [2],
            r"'0.weight' of layer 0 \(Linear\) is also '2.weight' of layer 2 \(Linear\), but stages 0 and 1",
        ),
    ],
)
def test_what_makes_no_stages_is_named(made: list[nn.Module], stages: int | str | list[int], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        Pipeline(made, stages=stages)


def test_weights_may_be_shared_within_a_stage() -> None:
    assert Pipeline([*shared(), nn.Linear(4, 2)], stages=[3]).num_stages == 2


def test_it_runs_and_is_stored_like_a_sequence_of_its_layers() -> None:
    torch.manual_seed(0)
    model = Pipeline([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], stages=2)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plain.load_state_dict(model.state_dict())
    values = torch.randn(3, 4)
    assert torch.equal(model(values), plain(values))
    assert torch.equal(model.run(1, model.run(0, values)), plain(values))


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ({"values": torch.ones(1)}, r"layer 1 \(Pair\) returned dict, but what goes from stage 0 to the next is a"),
        ((torch.ones(1), None), r"layer 1 \(Pair\) returned a tuple with a NoneType, but what goes from stage 0"),
        (torch.ones(1, dtype=torch.int64), r"layer 1 \(Pair\) returned torch.int64, which has no gradient"),
        ((torch.ones(1).bool(), torch.ones(1).long()), "returned torch.bool, torch.int64, which has no gradient"),
        ((), "returned an empty tuple, which has no gradient, at the end of stage 0"),
    ],
)
def test_what_can_not_go_to_the_next_stage_is_named(returned: object, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        pack(returned, 0, "layer 1 (Pair)")


def test_a_tensor_that_is_there_twice_travels_once() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    values, places = pack((one, two, one), 0, "layer 1 (Pair)")
    assert places == (0, 1, 0) and values[0] is one and values[1] is two
    assert [id(value) for value in unpack(values, places)] == [id(one), id(two), id(one)]
    assert pack(one, 0, "layer 1 (Pair)") == ((one,), ())
    assert unpack((one,), ()) is one and isinstance(unpack((one,), (0,)), tuple)


# Jobs


def job_of(model: nn.Module | None = None, **fields: object) -> Job:
    made = Pipeline([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], stages=2) if model is None else model
    given = {
        "batch_size": 4,
        "steps": 4,
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.1},
        "pipeline": "gpipe",
        **fields,
    }
    return Job(
        model=lambda: made,
        loss=lambda model, batch: model(batch[0]).sum(),
        dataset=TensorDataset(torch.ones(64, 4)),
        **given,  # type: ignore[arg-type]
    )


def test_tensors_know_their_stage() -> None:
    job = job_of(replicas=3)
    spec = job.spec(job.build_model())
    assert {one.name: one.fragment for one in spec.tensors} == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}
    assert (pipeline.stages(spec), pipeline.units(spec)) == (2, 6)
    assert pipeline.by_replica(spec, [1, 2, 4]) == {1: (0, 1), 2: (0,)}
    assert pipeline.named(spec, [3, 4, 1]) == "stage 0 of replica 1, stage 1 of replicas 0, 1"


def test_without_a_pipeline_a_model_in_stages_is_one_like_any_other() -> None:
    job = job_of(pipeline="whole-model", replicas=2)
    spec = job.spec(job.build_model())
    assert {one.fragment for one in spec.tensors} == {0}
    assert (pipeline.stages(spec), pipeline.units(spec)) == (1, 2)
    assert pipeline.named(spec, [0, 1]) == "replicas 0, 1"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": nn.Linear(4, 2)}, "pipeline gpipe needs a model in stages, but model.. returned a Linear"),
        ({"consistency": "softsync"}, "but consistency softsync does not; .* without spares, 'async' or 'ssp'"),
        (
            {"consistency": "ssp", "apply": "worker"},
            "but in consistency ssp:slack=3 each gradient of a stage of a pipeline is an update of its own",
        ),
        (
            {"consistency": "async", "apply": "worker"},
            "but in consistency async each gradient of a stage of a pipeline is an update of its own",
        ),
        ({"consistency": "async", "clip_norm": 1.0}, "by itself, but clip_norm=1 is one decision about the gradients"),
        ({"consistency": "async", "rule": "dc-asgd"}, "rule dc-asgd.* needs to know what was sent .* several versions"),
        ({"consistency": "async", "rule": "staleness-aware"}, "needs to know by how many updates .* several versions"),
        ({"consistency": "async:in_stages=true", "pipeline": "whole-model"}, "in_stages is for pipelines"),
        ({"consistency": "sync:spares=1", "replicas": 3}, "but consistency sync:spares=1 does not"),
        ({"cadence": "diloco"}, "cadence diloco needs workers that have the whole model"),
        ({"nan_policy": "skip"}, "nan_policy 'skip' is for workers that see all gradients"),
        ({"codec_up": "topk"}, "codec topk remembers what it has sent"),
        ({"codec_down": "delta:by=int8,refresh=2", "checkpoint_every": 2}, "codec delta.* remembers what it has sent"),
        ({"codec_parcels": "topk"}, "codec_parcels is 'topk', .* a memory of what .* choose from raw, bf16, "),
        ({"codec": "auto"}, "codec auto measures workers that have the whole model"),
    ],
)
def test_what_does_not_work_in_stages_is_refused_by_name(fields: dict[str, object], sentence: str) -> None:
    job = job_of(**fields)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=sentence):
        job.spec(job.build_model())


def test_a_stage_in_which_nothing_is_trained_is_named() -> None:
    model = Pipeline([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], stages=2)
    model[0].requires_grad_(False)
    job = job_of(model)
    with pytest.raises(JobError, match=r"nothing is trained in stage 0, layer 0 \(Linear\) to layer 1 \(ReLU\)"):
        job.spec(job.build_model())


# stages="auto"


class Wide(nn.Module):
    """No parameters to speak of, and much to compute: a number of parameters says nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        large = values.repeat(512, 128)
        return values @ self.rows + (large @ large.T)[:4, :1]


def auto_job(stages: str, made: Sequence[nn.Module], hosts: Sequence[Any] = (), **fields: object) -> Job:
    given = {"pipeline": "flush", "accumulate": 4, **fields}
    return replace(job_of(**given), model=lambda: Pipeline(list(made), stages=stages, workers=hosts))  # type: ignore[arg-type]


def linear(count: int) -> list[nn.Module]:
    return [layer for _ in range(count) for layer in (nn.Linear(4, 4), nn.ReLU())]


@pytest.mark.parametrize(
    ("stages", "made", "hosts", "cuts"),
    [
        ("auto:4", linear(4), (), (2, 4, 6)),
        ("auto:1", linear(4), (), ()),
        # By parameters it would be [3]: the slow layer is the last one.
        ("auto:2", [*(nn.Linear(4, 4) for _ in range(5)), Wide()], (), (5,)),
        # A stage on three workers has three times as much to do.
        ("auto", [nn.Linear(4, 4) for _ in range(8)], (3, 1), (6,)),
        ("auto:2", [*shared(), nn.Linear(4, 4)], (), (3,)),
    ],
)
def test_automatic_stages_take_equally_long_by_flops_and_bytes(
    stages: str, made: list[nn.Module], hosts: Sequence[int], cuts: tuple[int, ...]
) -> None:
    job = auto_job(stages, made, hosts, replicas=3 if hosts else 1)
    model = job.build_model()
    assert isinstance(model, Pipeline) and model.cuts == cuts
    assert pipeline.stages(job.spec(model)) == len(cuts) + 1


def test_automatic_stages_give_each_worker_equally_much_where_one_has_several() -> None:
    job = auto_job("auto", [nn.Linear(4, 4) for _ in range(8)], [[0], [1], [0]])
    model = job.build_model()
    assert isinstance(model, Pipeline) and model.num_stages == 3
    assert len(model.span(1)) == len(model.span(0)) + len(model.span(2)) == 4
    assert pipeline.stages(job.spec(model)) == 3


@pytest.mark.parametrize(("workers", "replicas", "stages"), [(4, 1, 4), (4, 2, 2), (5, 2, 2), (2, 3, 1)])
def test_plain_auto_gives_each_worker_of_a_replica_a_stage(workers: int, replicas: int, stages: int) -> None:
    model = auto_job("auto", linear(4), replicas=replicas, workers=workers).build_model()
    assert isinstance(model, Pipeline) and model.num_stages == stages


class Changing(nn.Module):
    """Its forward pass makes a buffer, makes another one larger, changes weights and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=0.1)
        self.register_buffer("mask", None)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(4)
        self.seen = torch.zeros(len(values))
        self.calls += 1
        return values * self.mask + self.table(torch.arange(8)).sum()


def test_every_process_finds_the_same_cuts_of_a_model_that_nothing_has_changed() -> None:
    def made() -> Pipeline:
        layers = [nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 4), Changing()]
        return Pipeline(layers, stages="auto:2")

    job = replace(job_of(accumulate=4), model=made)
    torch.manual_seed(job.seed)
    seed_everything(job.seed)
    expected, states = made().state_dict(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])
    for _ in range(2):
        model = job.build_model()
        assert isinstance(model, Pipeline) and model.cuts == (3,)
        assert model.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert model[4].calls == 0
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])


def test_automatic_stages_refuse_a_loss_that_calls_the_model_with_two_inputs() -> None:
    def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model(batch[0], targets=batch[0]).sum()
        return found

    with pytest.raises(JobError, match="was called with 1, and targets"):
        replace(auto_job("auto:2", linear(2)), loss=loss).build_model()


def test_automatic_stages_of_a_model_that_takes_two_tensors() -> None:
    class Two(nn.Linear):
        def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            return super().forward(given[0] + given[1]), given[1]

    def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = model((batch[0], batch[0]))[0].sum()
        return found

    model = replace(auto_job("auto:2", [Two(4, 4), Two(4, 4)]), loss=loss).build_model()
    assert isinstance(model, Pipeline) and model.cuts == (1,)


def test_workers_that_share_layers_have_a_stage_together() -> None:
    job = auto_job("auto", linear(4), workers=4, tensor_ranks=2, tensor_parallel={"0": "gathered"})
    model = job.build_model()
    assert isinstance(model, Pipeline) and model.num_stages == 2
    # What a layer leaves in parts goes to one of the same stage: without these it would be [4].
    parted = replace(job, tensor_parallel={"2": "colwise", "4": "rowwise"})
    model = parted.build_model()
    assert isinstance(model, Pipeline) and model.cuts in ((2,), (6,))
    assert pipeline.stages(parted.spec(model)) == 2
    # A whole model has no stages that could part layers from each other.
    whole = replace(job, pipeline="whole-model", tensor_parallel={"0": "colwise", "2": "rowwise"})
    assert pipeline.stages(whole.spec(whole.build_model())) == 1


@pytest.mark.parametrize(
    ("stages", "made", "fields", "sentence"),
    [
        ("auto:5", linear(3), {}, r"5 stages of 6 layers, .* the model has 3 of them: 0 \(Linear\), 2 \(Linear\), 4 "),
        ("auto", linear(3), {"workers": 4}, 'give at most stages="auto:3", or start fewer workers'),
        (
            "auto:2",
            shared(),
            {},
            "no stage can begin with layer 1, 2: weights, or outputs in parts, are shared across it",
        ),
        (
            "auto",
            linear(3),
            {},
            "the number of workers in its cluster, which is not known here; give a number, such as",
        ),
        (
            "auto:2",
            [nn.Linear(4, 4), nn.Linear(9, 4)],
            {},
            r"first microbatch, but layer 1 \(Linear\) raised RuntimeError",
        ),
        ("auto:2", linear(3), {"batch_size": 10_000}, r"^the data set has \d+ samples; one step needs 40000"),
    ],
)
def test_what_can_not_be_cut_automatically_is_named(
    stages: str, made: list[nn.Module], fields: dict[str, Any], sentence: str
) -> None:
    job = auto_job(stages, made, **fields)
    with pytest.raises(JobError, match=sentence):
        job.spec(job.build_model())
    # Without a pipeline nobody asks for stages.
    whole = replace(job, pipeline="whole-model", batch_size=1)
    model = whole.build_model()
    assert len(whole.spec(model).tensors) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ([nn.Linear(4, 4), nn.LazyLinear(4)], "^'1.weight' is not initialised yet"),
        ([nn.ReLU(), nn.ReLU()], "^the model has no parameters that require a gradient"),
        ([], "^the model has no parameters that require a gradient"),
    ],
)
def test_what_no_process_can_compute_is_told_before_it_is_cut(made: list[nn.Module], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        auto_job("auto:2", made).build_model()


def test_a_loss_that_ends_the_process_is_told_as_such() -> None:
    def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        raise SystemExit(3)

    with pytest.raises(JobExitError, match=r"^loss\(model, batch\) called sys.exit\(3\)"):
        replace(auto_job("auto:2", linear(3)), loss=loss).build_model()
