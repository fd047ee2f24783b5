"""shardline partition: what it measures, prints and writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardline.cli.main import main
from shardline.job import Job, load_job
from shardline_pipeline import stages
from shardline_pipeline.model import Pipeline
from shardline_pipeline.partition.measure import measure, shapes
from shardline_pipeline.partition.profile import Profile, coded
from shardline_pipeline.split.model import Split

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shardline


def linear():
    layers = [nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(inplace=True), nn.Linear(256, 256),
              nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4)]
    return shardline.Pipeline(layers, stages=2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, values):
        return torch.relu(values + self.second(torch.relu(self.first(values))))


def residual():
    layers = [nn.Unflatten(1, (2, 2, 2)), nn.Upsample(scale_factor=8), nn.Conv2d(2, 8, 3, padding=1),
              *(Block() for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return shardline.Pipeline(layers, stages=2)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = shardline.Job(
    model=MODEL, loss=loss, dataset=TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,))),
    optimizer="SGD", optimizer_args={"lr": 0.1}, batch_size=4, accumulate=8, steps=50,
)
"""

LINEAR = "shardline.Pipeline(layers, stages=2)"


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    path = tmp_path / "linear.py"
    path.write_text(JOB.replace("MODEL", "linear"))
    return path


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    path = tmp_path / "residual.py"
    path.write_text(JOB.replace("MODEL", "residual"))
    return path


def as_counted(model: nn.Sequential, job: Job) -> Profile:
    """What measure() returns, with times that follow from the layers alone: a plan depends on no clock."""
    found = shapes(model, job)
    seconds = [1e-5 + one.flops / 2e10 for one in found.layers]
    layers = [replace(one, forward_s=s, backward_s=2 * s) for one, s in zip(found.layers, seconds, strict=True)]
    return replace(found, layers=tuple(layers), measured="counted")


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline_pipeline.partition.measure.measure", as_counted)


def planned(path: Path, *arguments: str) -> dict[str, Any]:
    out = path.with_suffix(".json")
    assert main(["partition", str(path), *arguments, "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_linear_layers_are_cut_and_the_lines_for_the_job_are_said(
    linear: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(linear, "--workers", "4", "--link", "10Mbit")
    said = capsys.readouterr().out
    assert found["better"] == "pipeline" and len(found["staged"]["stages"]) > 1
    cuts = [stage["first"] for stage in found["staged"]["stages"][1:]]
    assert f"    shardline.Pipeline(layers, stages={cuts})" in said.splitlines()
    assert '    pipeline="flush", replicas=1, accumulate=8,' in said.splitlines()
    assert "times as fast, with" in said and "fewer bytes on all wires" in said
    # What it says can be built.
    Pipeline([*load_job(linear).build_model()], stages=cuts)


def test_a_model_like_resnet_is_told_to_be_data_parallel(residual: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(residual, "--workers", "4", "--link", "1Gbit")
    assert found["better"] == "data parallel"
    said = capsys.readouterr().out
    assert "Data parallelism is better" in said
    assert '    pipeline="whole-model", replicas=4, accumulate=2,' in said.splitlines()


def test_a_profile_makes_plans_repeatable_and_of_another_model_is_refused(
    linear: Path, residual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline_pipeline.partition.measure.measure", measure)
    profile = tmp_path / "profile.json"
    arguments = ["--link", "1Gbit", "--profile", str(profile), "--pipeline", "double-buffer"]
    first = planned(linear, *arguments)
    assert planned(linear, *arguments) == first
    assert main(["partition", str(residual), *arguments]) == 2
    assert "name a new file" in capsys.readouterr().err


def test_codecs_count(linear: Path) -> None:
    plain, half = (planned(linear, "--link", "1Mbit", "--codec", codec) for codec in ("raw", "bf16"))
    ratio = half["data_parallel"]["parameter_bytes"] / plain["data_parallel"]["parameter_bytes"]
    assert ratio == pytest.approx(0.5, rel=0.02)


def test_codec_parcels_counts(linear: Path) -> None:
    plain, half, quarter = (
        planned(linear, "--link", "1Mbit", "--set", "batch_size=32", "--codec-parcels", codec)["staged"]
        for codec in ("", "bf16", "int8")
    )
    assert half["parcel_bytes"] / plain["parcel_bytes"] == pytest.approx(1 / 2)
    assert quarter["parcel_bytes"] / plain["parcel_bytes"] == pytest.approx(1 / 4, rel=0.1)
    assert plain["parameter_bytes"] == half["parameter_bytes"]


class Several(nn.Module):
    """Returns what it got, a mask, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = values @ self.weight
        return hidden, hidden, (values > 0), self.weight


class Joined(nn.Module):
    def forward(self, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden, _, mask, weight = given
        return (hidden * mask) @ weight


def test_only_activations_with_a_gradient_are_counted_encoded_and_each_once() -> None:
    job = job_of(Several(), Joined(), nn.Linear(8, 8))
    profile = shapes(job.build_model(), job)  # type: ignore[arg-type]
    hidden, mask, weight = 4 * 8 * 4, 4 * 8, 8 * 8 * 4
    assert coded(profile, "")[0] == (hidden + mask + weight, hidden + weight)
    assert coded(profile, "bf16")[0] == (hidden / 2 + mask + weight, hidden / 2 + weight)
    assert coded(profile, "bf16")[-1] == (0, 0)


def test_a_sequence_of_layers_is_planned_and_other_models_are_told_what_to_do(
    linear: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = linear.read_text()
    named = "nn.Sequential(OrderedDict((f'layer{n}', one) for n, one in enumerate(layers)))"
    linear.write_text(
        "from collections import OrderedDict\n" + text.replace("shardline.Pipeline(layers, stages=2)", named)
    )
    found = planned(linear, "--link", "10Mbit")
    assert found["better"] == "pipeline" and found["staged"]["parameter_bytes"] > 0
    capsys.readouterr()
    for model, why in (
        ("nn.Bilinear(8, 8, 4)", "model() returned a Bilinear, which has no layers to cut between; return "),
        ("shardline.Pipeline.split(nn.Linear(8, 4), torch.zeros(4, 8), cuts=[])", "can begin with any of its modules"),
    ):
        linear.write_text(text.replace(LINEAR, model))
        assert main(["partition", str(linear)]) == 2
        assert why in capsys.readouterr().err


SPLIT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(8, 256), nn.LayerNorm(256), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Part() for _ in range(3))

    def forward(self, values, *, scale):
        seen = self.first(values)
        hidden = self.norm(seen)
        for block in self.blocks:
            hidden = block(hidden)
        last = nn.functional.linear(hidden + seen, self.blocks[2].weight)
        return self.out(last[:, :8] * scale) + last @ self.blocks[2].weight[:, :4]


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, values):
        return self.inner(values) @ self.weight


def split():
    example = torch.zeros(4, 8)
    return shardline.Pipeline.split(Net(), example, example_kwargs={"scale": 2.0}, cuts=["blocks.1"])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0], scale=2.0), batch[1])


job = """


def test_a_model_that_is_traced_is_cut_between_its_modules(linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = linear.read_text().replace("linear, loss=loss", "split, loss=loss")
    linear.write_text(text.replace("\njob = ", SPLIT, 1))
    found = planned(linear, "--link", "10Mbit", "--set", "pipeline=flush", "--profile", str(linear.parent / "profile"))
    said = capsys.readouterr().out
    profile = Profile.read((linear.parent / "profile").read_text(), "profile")
    starts = ["its beginning", "norm", "blocks.0", "blocks.1", "blocks.2", "out"]
    assert [one.name for one in profile.layers] == [f"{number} ({name})" for number, name in enumerate(starts)]
    # What goes round the blocks counts at each of their borders; and the last part uses a weight of blocks.2.
    one = 4 * 256 * 4
    assert [layer.output_bytes for layer in profile.layers[:4]] == [one, 2 * one, 2 * one, 2 * one]
    assert not profile.joined and [one.weight_bytes for one in profile.layers] == [0, 0, 0, 0, 4 * 256 * 256, 0]
    assert [layer.trained_bytes for layer in profile.layers[2:4]] == [4 * (2 * 256 * 256 + 256)] * 2
    assert [stage["first"] for stage in found["present"]["stages"]] == [0, 3]
    assert found["better"] == "pipeline" and found["staged"]["stages"][-1]["end"] == 6
    cuts = [starts[stage["first"]] for stage in found["staged"]["stages"][1:]]
    # A weight that each microbatch would take along both ways costs too much.
    assert (
        "out" not in cuts and f"    shardline.Pipeline.split(model, example_inputs, cuts={cuts})" in said.splitlines()
    )
    # What it says can be built: in each stage something is trained.
    job = load_job(linear, [("pipeline", "flush")])
    model = job.build_model()
    assert isinstance(model, Split)
    assert stages(job.spec(model.cut_at(cuts))) == len(cuts) + 1
    assert planned(linear, "--link", "10Mbit", "--profile", str(linear.parent / "profile"))["staged"]["stages"]


def test_what_a_job_says_of_modules_is_for_the_traced_model_itself(linear: Path) -> None:
    text = linear.read_text().replace(
        "linear, loss=loss", "split, param_groups=groups, codec_tensors=codecs, loss=loss"
    )
    settings = """
def groups(model):
    others = [one for name, one in model.named_parameters() if name != "out.bias"]
    return [{"params": others}, {"params": [model.out.bias], "lr": 0.5}]


codecs = {"blocks.*.weight": "bf16"}
"""
    linear.write_text(text.replace("\njob = ", settings + SPLIT, 1))
    assert len(planned(linear, "--link", "10Mbit")["staged"]["stages"]) > 1


class Pair(nn.Module):
    """Takes a tuple of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, mask = given
        return self.inner(values) * mask


def test_a_model_that_is_called_with_a_tuple_is_measured() -> None:
    job = replace(
        job_of(Pair(), nn.Linear(8, 4)), loss=lambda model, batch: model((batch[0], batch[0] > 0)).square().mean()
    )
    profile = measure(job.build_model(), job)  # type: ignore[arg-type]
    assert [one.output_bytes for one in profile.layers] == [4 * 8 * 4, 0]
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in profile.layers)


def test_with_the_optimizer_on_the_worker_memory_has_its_state_and_stages_keep_their_gradients(linear: Path) -> None:
    text = linear.read_text().replace('optimizer="SGD", optimizer_args={"lr": 0.1}', 'optimizer="Adam"')
    linear.write_text(text)
    profile = linear.with_suffix(".profile")
    found = {
        apply: planned(linear, "--link", "10Mbit", "--set", f"apply={apply}", "--profile", str(profile))
        for apply in ("server", "worker")
    }
    trained = 4 * (8 * 256 + 256 + 2 * (256 * 256 + 256) + 2 * 256 + 256 * 4 + 4)
    whole = {apply: one["data_parallel"]["memory_bytes"][0] for apply, one in found.items()}
    # Adam's two moments.
    assert whole["worker"] - whole["server"] == pytest.approx(2 * trained, rel=0.01)
    assert found["worker"]["data_parallel"]["parameter_bytes"] == found["server"]["data_parallel"]["parameter_bytes"]
    # Batch norm's statistics are all that travels.
    assert 0 < found["worker"]["staged"]["parameter_bytes"] <= 3000
    assert all(len(stage["workers"]) == 1 for stage in found["worker"]["staged"]["stages"])


def test_the_stages_that_the_job_has_are_predicted_beside_the_best_ones(
    linear: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(linear, "--workers", "4", "--link", "10Mbit", "--set", "pipeline=flush", "--set", "replicas=2")
    said = capsys.readouterr().out
    assert [(one["first"], one["workers"]) for one in found["present"]["stages"]] == [(0, [0, 1]), (4, [2, 3])]
    speed = found["present"]["steps_per_s"]
    assert speed <= found["staged"]["steps_per_s"] * 1.0001
    assert f"the job's own 2 stages: {speed:,.2f} steps/s" in said
    # Without a pipeline it has none.
    assert planned(linear, "--workers", "4", "--link", "10Mbit")["present"] is None


def test_how_the_job_cuts_its_model_does_not_matter(linear: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear.write_text(linear.read_text().replace("stages=2", 'stages="auto"'))
    # Each worker can't have a stage, and here nobody asks for it.
    assert main(["partition", str(linear), "--workers", "9", "--set", "pipeline=flush"]) == 0, capsys.readouterr().err
    assert main(["bench", "codecs", str(linear), "--only", "raw", "--set", "pipeline=flush"]) == 0


def test_workers_that_share_cores_gain_less_from_a_pipeline(linear: Path) -> None:
    profile = str(linear.with_suffix(".profile"))
    found = [planned(linear, "--profile", profile, *more) for more in ([], ["--cores", "4"], ["--cores", "1"])]
    own, four, one = (each["data_parallel"]["seconds"] for each in found)
    assert own == four and one == pytest.approx(4 * own)


def test_workers_that_share_machines(linear: Path) -> None:
    found = planned(linear, "--workers", "4", "--group", "2", "--group-link", "10Gbit", "--link", "1Mbit")
    assert found["better"] == "pipeline"


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--memory", "10kB"], 2, r"neither the whole model nor a stage of any pipeline fits into --memory 10kB: with"),
        (["--memory", "lots"], 2, r"--memory: 'lots' is not an amount of memory"),
        (["--group", "3"], 2, r"--workers 4 don't make groups of --group 3; give a multiple of 3"),
    ],
)
def test_what_it_refuses(
    linear: Path, arguments: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["partition", str(linear), *arguments]) == code
    assert why in capsys.readouterr().err


def job_of(*layers: nn.Module, inputs: int = 8) -> Job:
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.randn(16, inputs))
    return Job(
        model=lambda: Pipeline(list(layers), stages=1), loss=lambda model, batch: model(batch[0]).square().mean(),
        dataset=data, optimizer="SGD", optimizer_args={"lr": 0.1}, batch_size=4, steps=1,
    )  # fmt: skip


def test_a_profile_has_the_shapes_of_the_layers() -> None:
    first = nn.Linear(8, 32)
    first.weight.requires_grad_(False)
    first.bias.requires_grad_(False)
    job = job_of(first, nn.ReLU(), nn.Linear(32, 8), nn.BatchNorm1d(8))
    profile = measure(job.build_model(), job)  # type: ignore[arg-type]
    assert [one.output_bytes for one in profile.layers] == [4 * 32 * 4, 4 * 32 * 4, 4 * 8 * 4, 0]
    # Nothing before layer 2 is trained.
    assert [one.gradient_bytes for one in profile.layers] == [0, 0, 4 * 8 * 4, 0]
    assert [one.trained_bytes for one in profile.layers] == [0, 0, 4 * (32 * 8 + 8), 4 * 16]
    assert [one.fixed_bytes for one in profile.layers] == [4 * (8 * 32 + 32), 0, 0, 4 * 16 + 8]
    assert [one.flops for one in profile.layers] == [2 * 4 * 8 * 32, 0, 2 * 4 * 8 * 32, 0]
    assert all(one.forward_s > 0 for one in profile.layers)


def test_shapes_are_the_same_in_every_process_and_those_that_are_measured() -> None:
    job = job_of(nn.Linear(8, 32), nn.Dropout(), nn.Linear(32, 8))
    first, second = (shapes(job.build_model(), job) for _ in range(2))  # type: ignore[arg-type]
    assert first == second
    measured = measure(job.build_model(), job)  # type: ignore[arg-type]
    assert first.layers == tuple(replace(one, forward_s=0.0, backward_s=0.0) for one in measured.layers)


class Recurrent(nn.LSTM):
    def forward(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        made: torch.Tensor = super().forward(values[:, None].expand(-1, 5, -1))[0]
        return made


def test_a_recurrent_layer_counts_the_same_whatever_computes_it() -> None:
    job = job_of(Recurrent(8, 32, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(64, 8))
    found = []
    for together in (True, False):
        with torch.backends.mkldnn.flags(enabled=together):  # type: ignore[no-untyped-call]
            found.append([one.flops for one in shapes(job.build_model(), job).layers])  # type: ignore[arg-type]
    assert found[0] == found[1] and found[0][0] > 2 * 4 * 5 * 2 * 4 * 32 * (8 + 32)


def test_layers_that_share_weights_are_not_parted() -> None:
    shared = nn.Linear(8, 8)
    job = job_of(nn.Linear(8, 8), shared, nn.ReLU(), shared, nn.Linear(8, 8))
    profile = shapes(job.build_model(), job)  # type: ignore[arg-type]
    assert profile.joined == (2, 3)
    assert profile.layers[3].trained_bytes == 0
