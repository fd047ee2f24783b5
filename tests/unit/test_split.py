"""Models that are traced and cut: names, devices, modes, and what is refused before training starts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline.errors import JobError
from shardline.job import Job
from shardline_lab.simulator.runs import measure_stages
from shardline_pipeline.model import Pipeline
from shardline_pipeline.partition.activations import Activations
from shardline_pipeline.partition.measure import shapes
from shardline_pipeline.partition.profile import coded
from shardline_pipeline.split.model import Split
from shardline_pipeline.staged import StagedModel
from shardline_pipeline.worker.memory import activation_bytes
from tests.conformance.test_pipeline import Skips, Words, skips, words, words_loss


class Two(nn.Module):
    """Two linear layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def between(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values)  # type: ignore[no-any-return]

    def forward(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.between(self.first(values)) * scale)  # type: ignore[no-any-return]


class Branches(Two):
    def between(self, values: torch.Tensor) -> torch.Tensor:
        if values.sum() > 0:
            values = -values
        return self.norm(values)  # type: ignore[no-any-return]


class Leaves(Two):
    def between(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values) + torch.tensor(values.detach().numpy())  # type: ignore[no-any-return]


class CallsTwice(Two):
    def between(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(values))  # type: ignore[no-any-return]


class SharesStatistics(Two):
    def forward(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(super().forward(values, scale))  # type: ignore[no-any-return]


class DrawsFromPython(Two):
    def between(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(values) * random.random()  # type: ignore[no-any-return]


class Overwrites(Two):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def between(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(values))  # type: ignore[no-any-return]


class Picks(Two):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)

    def between(self, values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(values.argmax(1)))  # type: ignore[no-any-return]


class Idle(Two):
    def between(self, values: torch.Tensor) -> torch.Tensor:
        return values


def job_of(model: nn.Module, cuts: str | Sequence[str] = ("last",), **fields: object) -> Job:
    return Job(
        model=lambda: Pipeline.split(model, torch.randn(4, 4), cuts=cuts),
        loss=lambda model, batch: model(batch[0]).sum(),
        dataset=TensorDataset(torch.ones(64, 4)),
        batch_size=4,
        steps=2,
        optimizer="SGD",
        optimizer_args={"lr": 0.1},
        pipeline="gpipe",
        **fields,  # type: ignore[arg-type]
    )


def tied_head() -> nn.Module:
    return Pipeline.split(Words(), torch.zeros(4, 12, dtype=torch.int64), cuts=["blocks.1", "head"])


@pytest.mark.parametrize(
    ("model", "cuts", "sentence"),
    [
        (Two, ["middle"], r"'middle' does not begin a stage; give names of the model's modules, .*'first', 'last'"),
        (Two, ["last", "last"], "'last' does not begin a stage"),
        (Two, ["first"], "1 of them compute nothing: those before 'first'"),
        (Branches, ["last"], r"can't trace the Branches at 'if values.sum\(\) > 0:' \(.*test_split.py, line \d+\)"),
        (Leaves, ["last"], r"at 'return self.norm\(values\) \+ torch.tensor.* \(.*test_split.py, line \d+\)"),
        (CallsTwice, ["last"], "the model calls 'last' 2 times, so a stage can't begin with it"),
        (Idle, ["norm"], "the model calls 'norm' 0 times"),
        (Idle, ["last"], "uses 'norm.weight', 'norm.bias', so no stage can train it"),
        (SharesStatistics, ["last"], "have other buffer 'norm.*' than the model itself"),
        (DrawsFromPython, ["last"], "have other outputs than the model itself"),
        (
            Overwrites,
            ["act"],
            "stage 1, the Overwrites from 'act' to its end, .* raised RuntimeError: a leaf",
        ),
        (Two, "last", "cuts is 'last'; give \"auto:4\" for 4 stages, .* or a list of what begins a stage"),
        (
            Two,
            "auto",
            "Pipeline.split: cuts='auto' is settled when .* the number of workers .*, such as cuts=\"auto:4\"",
        ),
        (
            Two,
            "auto:4",
            r"Pipeline.split: 4 stages of 3 layers, .* has 3 of them: 0 .*, 1 \(norm\), 2 \(last\); .*:3\"",
        ),
        (CallsTwice, "auto:3", r"3 stages of 2 layers, .* give at most cuts=\"auto:2\", or start fewer workers"),
        (Branches, "auto:2", r"can't trace the Branches at 'if values.sum\(\) > 0:' \(.*test_split.py, line \d+\)"),
        (Picks, ["embed"], "what is before 'embed' returned torch.int64, which has no gradient, at the end of stage 0"),
    ],
)
def test_what_can_not_be_split_is_named_before_training(
    model: type[nn.Module], cuts: str | Sequence[str], sentence: str
) -> None:
    job = job_of(model(), cuts)
    with pytest.raises(JobError, match=sentence):
        job.spec(job.build_model())


def test_a_call_that_fits_no_trace_is_named() -> None:
    model = Pipeline.split(Two(), torch.randn(4, 4), cuts=["last"])
    with pytest.raises(
        JobError, match=r"calls the model with float32 \(8, 4\), but its stages were traced with float32"
    ):
        model.run(0, torch.randn(8, 4))
    with pytest.raises(JobError, match=r"with float32 \(4, 4\), 2.0, but"):
        model.run(0, torch.randn(4, 4), scale=2.0)
    with pytest.raises(JobError, match=r"Two.forward\(\) was called wrongly: .* argument 'size'"):
        model.run(0, torch.randn(4, 4), size=2.0)
    assert torch.equal(model.run(0, values=torch.ones(4, 4))[0], model.run(0, torch.ones(4, 4))[0])


@pytest.mark.parametrize(("plain", "split"), [(Skips, skips), (Words, words)])
def test_names_and_values_are_the_model_s_own(plain: type[nn.Module], split: Callable[[], StagedModel]) -> None:
    torch.manual_seed(0)
    whole = plain()
    torch.manual_seed(0)
    stages = split()
    assert [name for name, _ in stages.named_parameters()] == [name for name, _ in whole.named_parameters()]
    stages.stage_of_tensor("")
    assert list(stages.state_dict()) == list(whole.state_dict())
    for name, values in stages.state_dict().items():
        assert torch.equal(values, whole.state_dict()[name]), name
    torch.manual_seed(1)
    again = copy.deepcopy(stages)
    again.load_state_dict(whole.state_dict())
    assert again.state_dict()[name].data_ptr() != values.data_ptr()


def test_tensors_belong_to_the_first_stage_that_uses_them() -> None:
    job = replace(job_of(Two()), model=words, dataset=TensorDataset(torch.ones(64, 12)))
    spec = job.spec(job.build_model())
    found = {one.name: one.fragment for one in spec.tensors}
    assert found["embed.weight"] == 0 and "head.weight" not in found
    assert {name.split(".")[1]: stage for name, stage in found.items() if name.startswith("blocks")} == {
        "0": 0,
        "1": 1,
        "2": 2,
    }


def test_a_stage_with_only_tied_weights_is_refused() -> None:
    job = replace(job_of(Two()), model=tied_head, dataset=TensorDataset(torch.ones(64, 12)))
    with pytest.raises(JobError, match="nothing is trained in stage 2, the Words from 'head' to its end"):
        job.spec(job.build_model())


def test_the_rest_of_the_model_is_there_and_changes_mode_with_it() -> None:
    model = Pipeline.split(Two(), torch.randn(4, 4), cuts=["last"])
    values = torch.randn(4, 4)
    assert model.between(values).shape == (4, 4)
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    model.eval()
    expected = model(values)
    assert torch.equal(model.run(1, model.run(0, values)), expected)
    model.train()
    assert not torch.equal(model(values), expected)
    model.double()
    assert model.norm.running_mean.dtype == torch.float64


def test_automatic_cuts_are_those_of_the_same_layers_in_a_list() -> None:
    layers = [layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Tanh())]
    listed = job_of(Two(), accumulate=4)
    listed = replace(listed, model=lambda: Pipeline(layers, stages="auto:3"))
    traced = job_of(nn.Sequential(*layers), "auto:3", accumulate=4)
    model, other = traced.build_model(), listed.build_model()
    assert isinstance(model, Split) and isinstance(other, Pipeline)
    assert model.cuts == tuple(map(str, other.cuts)) and model.num_stages == 3
    spec, stages = traced.spec(model), {0: (0, 1, 2)}
    assert [one.fragment for one in spec.tensors] == [one.fragment for one in listed.spec(other).tensors]
    # What a worker checks before it computes.
    assert activation_bytes(model, spec, stages) == activation_bytes(other, listed.spec(other), stages)
    # Whole, nobody asks for stages.
    whole = replace(traced, pipeline="whole-model").build_model()
    assert torch.equal(whole(torch.ones(4, 4)), nn.Sequential(*layers)(torch.ones(4, 4)))


def test_plain_automatic_cuts_are_as_many_as_workers_make_and_not_of_shared_layers() -> None:
    model = job_of(Two(), "auto", workers=2).build_model()
    assert isinstance(model, Split) and model.cuts in (("norm",), ("last",))
    with pytest.raises(JobError, match=r"but Pipeline.split traces those of its model"):
        job_of(Two(), "auto", workers=4, tensor_ranks=2, tensor_parallel={"last": "gathered"}).build_model()


def test_a_tied_weight_is_predicted_to_travel_as_it_does_and_to_take_memory_where_it_comes() -> None:
    job = replace(job_of(Two()), model=words, loss=words_loss, dataset=TensorDataset(torch.rand(64, 12)))
    model = job.build_model()
    assert isinstance(model, Split)
    profile = shapes(model.in_layers(), job)
    places = [[profile.module(number) for number in range(len(profile.layers))].index(cut) for cut in model.cuts]
    weight = model.embed.weight.nbytes
    assert [profile.layers[place - 1].weight_bytes for place in places] == [weight] * 2
    found = measure_stages(job, model)
    predicted = [coded(profile, "")[place - 1] for place in places]
    assert predicted == [*zip(found.parcel_bytes[:2], found.gradient_bytes[:2], strict=True)]
    held = Activations(profile, recompute=True)
    activation = 4 * 12 * 8 * 4
    assert held.held_bytes(places[0], places[1]) == activation + weight
    # Where the weight is at home it takes none.
    assert held.held_bytes(0, places[0]) == profile.batch_bytes
