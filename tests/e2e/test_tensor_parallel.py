"""Layers that workers share, on a real cluster: one process's parameters, and the same bits from run to run and after
deaths."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shardline.checkpoint import find_checkpoint
from shardline.core.spec import TensorKind
from shardline.job import load_job
from shardline.testing import ReferenceResult, reference
from tests.e2e.support import (
    PATIENCE_S,
    assert_refused,
    events,
    mortal_cluster,
    shardline,
    summary_of,
    train,
    wait_for_event,
    wait_for_step,
)

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.usefixtures("warm")]
JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shardline

WIDTH = 16


def data():
    return TensorDataset(torch.randint(0, 12, (256, 4)), torch.randint(0, 8, (256,)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, values):
        return values + self.drop(self.mlp(self.norm(values)))


def model():
    words = nn.Sequential(nn.Embedding(12, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH))
    layers = [words, Block(), Block(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)]
    return shardline.Pipeline(layers, stages=[2])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = shardline.Job(
    model=model, loss=loss, dataset=data, optimizer="SGD", optimizer_args={"lr": 0.05, "momentum": 0.9}, batch_size=4,
    accumulate=2, steps=60, checkpoint_every=10, tensor_ranks=2,
    tensor_parallel={"0.0": "rowwise", "*.mlp": "colwise/rowwise", "4": "gathered"},
)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB, encoding="utf-8")
    return path


def near_one_process(out: Path, job: Path, **settings: int) -> bool:
    """Within rounding: a sum over ranks has another order than one over the columns of a matrix."""
    result = reference(load_job(job, [(name, str(value)) for name, value in {**settings, "tensor_ranks": 1}.items()]))
    found = find_checkpoint(out).state_dict()
    expected = {**result.params, **result.buffers}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    return True


def sha256(out: Path) -> str:
    return str(summary_of(out)["sha256"])


@pytest.mark.part(of=4, first=3)
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        pytest.param(2, [], id="two ranks"),
        pytest.param(4, ["replicas=2"], id="two ranks of two replicas"),
        pytest.param(4, ["pipeline=flush"], id="two ranks of two stages"),
        pytest.param(4, ["pipeline=flush", "replicas=2"], id="two ranks of two stages of two replicas"),
    ],
)
def test_ranks_train_what_one_process_trains_with_the_same_bits_each_time(
    tmp_path: Path, job: Path, workers: int, settings: list[str]
) -> None:
    outs = [tmp_path / "first", tmp_path / "second"]
    options = [part for setting in settings for part in ("--set", setting)]
    for out, ps in zip(outs, ("2", "1"), strict=True):
        finished = train(job, out, "--ps", ps, "--workers", str(workers), "--steps", "15", *options)
        assert finished.code == 0, finished
    assert sha256(outs[0]) == sha256(outs[1])
    replicas = 2 if "replicas=2" in settings else 1
    assert near_one_process(outs[0], job, steps=15, replicas=replicas)


def test_jobs_of_one_host_whose_tasks_have_the_same_names_keep_to_themselves(tmp_path: Path, job: Path) -> None:
    outs = {seed: tmp_path / f"seed {seed}" for seed in range(1, 4)}
    with ThreadPoolExecutor(len(outs)) as pool:
        options = ("--workers", "2", "--steps", "10", "--set")
        runs = [pool.submit(train, job, out, *options, f"seed={seed}") for seed, out in outs.items()]
        for run in runs:
            assert run.result().code == 0, run.result()
    assert all(near_one_process(out, job, steps=10, seed=seed) for seed, out in outs.items())


def gap(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """How far two states are from each other, over all parameters and buffers."""
    assert one.keys() == other.keys()
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one) ** 0.5


@pytest.mark.part(of=4, first=3)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["codec=int8"], id="gradients in int8"),
        pytest.param(["codec=bf16"], id="gradients and parameters in bf16"),
        pytest.param(["pipeline=flush", "codec_parcels=bf16"], id="activations in bf16"),
        pytest.param(["pipeline=flush", "codec_parcels=int8", "codec=int8"], id="activations and gradients in int8"),
    ],
)
@pytest.mark.long
def test_codecs_write_the_parts_of_ranks_as_they_write_whole_layers(
    tmp_path: Path, job: Path, settings: list[str]
) -> None:
    # Wide enough to be encoded, and blocks of int8 do not cross the border of two parts.
    job.write_text(JOB.replace("WIDTH = 16", "WIDTH = 256"), encoding="utf-8")
    options = ["--steps", "6", *(part for setting in settings for part in ("--set", setting))]
    outs = [tmp_path / "first", tmp_path / "second", tmp_path / "whole"]
    stages = 2 if "pipeline=flush" in settings else 1
    for out, ps, ranks in zip(outs, (2, 1, 1), (2, 2, 1), strict=True):
        workers = str(stages * ranks)
        finished = train(job, out, "--ps", str(ps), "--workers", workers, "--set", f"tensor_ranks={ranks}", *options)
        assert finished.code == 0, finished
    assert sha256(outs[0]) == sha256(outs[1])
    raw = reference(load_job(job, [("steps", "6"), ("tensor_ranks", "1")]))
    shared, whole = (find_checkpoint(out).state_dict() for out in (outs[0], outs[2]))
    # Sums in another order change which of two neighbours a few numbers are rounded to.
    error = gap(whole, {**raw.params, **raw.buffers})
    assert 0.0 < gap(shared, whole) < 0.3 * error


def test_a_job_goes_on_in_another_layout_with_the_same_bits(tmp_path: Path, job: Path) -> None:
    teams = {"2": [], "4": ["--set", "pipeline=flush"]}
    straight = tmp_path / "straight"
    assert train(job, straight, "--workers", "2", "--steps", "12").code == 0
    for first, then in (("2", "4"), ("4", "2")):
        # Stages change no bit of what ranks compute.
        out = tmp_path / f"{first} workers, then {then}"
        assert train(job, out, "--ps", "2", "--workers", first, "--steps", "6", *teams[first]).code == 0
        one = tmp_path / f"{first} workers, then 1"
        shutil.copytree(out, one)
        finished = train(job, out, "--workers", then, "--steps", "12", "--resume", *teams[then])
        assert finished.code == 0, finished
        assert sha256(out) == sha256(straight)
    # One process goes on from what ranks have written, their momentum included, as if it were its own.
    found, file = find_checkpoint(one), tmp_path / "model.pt"
    finished = shardline("export", one / "checkpoints" / "step-00000006", file)
    assert finished.code == 0, finished
    exported = torch.load(file)
    assert exported.keys() == found.state_dict().keys()
    kinds = {tensor.name: tensor.kind for tensor in found.tensors}
    start = ReferenceResult(
        step=6,
        version=6,
        params={name: values for name, values in exported.items() if kinds[name] is not TensorKind.BUFFER},
        buffers={name: values for name, values in exported.items() if kinds[name] is TensorKind.BUFFER},
        optimizer={
            tensor.name: {
                what: found.read_slice(tensor.name, 0, tensor.rows, what).view(tensor.shape)
                for what in found.states(tensor.name)
            }
            for tensor in found.tensors
            if tensor.kind is TensorKind.PARAM
        },
        losses=(),
    )
    assert all("momentum_buffer" in states for states in start.optimizer.values())
    alone = [("steps", "12"), ("tensor_ranks", "1")]
    assert train(job, one, "--steps", "12", "--workers", "1", "--set", "tensor_ranks=1", "--resume").code == 0
    assert sha256(one) == reference(load_job(job, alone), start=start).sha256


def test_other_ranks_and_none_go_on_from_a_checkpoint(tmp_path: Path, job: Path) -> None:
    out = tmp_path / "run"
    for steps, ranks in (("6", "2"), ("12", "4"), ("18", "1"), ("24", "2")):
        resume = ["--resume"] if out.exists() else []
        finished = train(
            job, out, "--ps", "2", "--workers", ranks, "--steps", steps, "--set", f"tensor_ranks={ranks}", *resume
        )
        assert finished.code == 0, finished
    assert near_one_process(out, job, steps=24)


@pytest.mark.part(of=6, first=4)
@pytest.mark.parametrize(
    ("dying", "options", "settings"),
    [
        pytest.param("worker/1", {"restart": True}, [], id="a rank comes back"),
        pytest.param("worker/0", {"restart": False}, [], id="a spare takes the place of rank 0"),
        pytest.param("ps/1", {"restart": True}, [], id="a server comes back"),
        pytest.param("chief/0", {"restart": True}, [], id="the chief comes back"),
        pytest.param("worker/2", {"restart": True}, [("pipeline", "flush")], id="a rank of a stage comes back"),
    ],
)
def test_a_death_changes_no_bit(
    tmp_path: Path, job: Path, dying: str, options: dict[str, bool], settings: list[tuple[str, str]]
) -> None:
    text = job.read_text()
    for name, value in settings:
        text = text.replace("tensor_ranks=2,", f"tensor_ranks=2, {name}={value!r},")
    job.write_text(text, encoding="utf-8")
    workers, out, undisturbed = 4 if settings else 3, tmp_path / "run", tmp_path / "undisturbed"
    assert train(job, undisturbed, "--workers", str(workers)).code == 0
    with mortal_cluster(job, out, workers=workers) as cluster:
        wait_for_event(out, "checkpoint", "checkpoint of step [12]0")
        wait_for_step(out, 13)
        cluster.kill(dying, **options)
        assert cluster.wait(timeout_s=PATIENCE_S) == 0, events(out)
    assert sha256(out) == sha256(undisturbed)
    if dying == "worker/0":
        assert any("rank 0 of replica 0 to worker/2" in told for told in events(out)), events(out)


@pytest.mark.part(of=2)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param(["--workers", "1"], "among 2 workers of one host, but the cluster has 1", id="too few workers"),
        pytest.param(["--workers", "3", "--set", "tensor_ranks=3"], "can't be shared by 3 workers", id="sizes"),
        pytest.param(["--workers", "2", "--set", "pipeline=stash"], "has no flush, and workers that share", id="stash"),
    ],
)
def test_what_cant_be_shared_is_refused_before_training(
    tmp_path: Path, job: Path, options: list[str], told: str
) -> None:
    out = tmp_path / "run"
    assert_refused(train(job, out, *options), 2, told)
    assert not events(out, "running")


def test_a_layer_between_that_parts_change_is_refused_before_training(tmp_path: Path, job: Path) -> None:
    job.write_text(JOB.replace("nn.GELU()", "nn.Softmax(-1)"), encoding="utf-8")
    out = tmp_path / "run"
    assert_refused(train(job, out, "--workers", "2"), 2, "would compute something else than the whole 1.mlp.2")
    assert not events(out, "running")
