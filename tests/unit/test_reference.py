"""The one-process reference: reproducible, resumable, and what plain torch does where the two can be compared."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import schedule
from shardline.core.tensor_bytes import params_sha256, tensor_bytes
from shardline.data import BatchSource, derive, seed_everything
from shardline.errors import NonFiniteError
from shardline.job import Job
from shardline.model import named_values
from shardline.testing import ReferenceResult, reference


def data() -> TensorDataset:
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.mean(dim=1, keepdim=True))


def mse(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))


def rich() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 1))


def make_job(**changes: Any) -> Job:
    settings: dict[str, Any] = {
        "model": mlp,
        "loss": mse,
        "dataset": data,
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.05, "momentum": 0.9},
        "batch_size": 4,
        "replicas": 3,
        "steps": 12,
        "seed": 7,
    }
    return Job(**{**settings, **changes})


def assert_same(ours: ReferenceResult, theirs: ReferenceResult) -> None:
    assert (ours.step, ours.version, ours.skipped) == (theirs.step, theirs.version, theirs.skipped)
    assert ours.sha256 == theirs.sha256
    assert ours.optimizer.keys() == theirs.optimizer.keys()
    for name, value in ours.buffers.items():
        assert torch.equal(value, theirs.buffers[name]), name
    for name, state in ours.optimizer.items():
        for key, value in state.items():
            same = torch.equal(value, theirs.optimizer[name][key]) if torch.is_tensor(value) else True
            assert same, (name, key)


def test_params_sha256_is_over_name_sorted_little_endian_bytes() -> None:
    params = {"b": torch.tensor([[1.5], [2.0]]).t(), "a": torch.tensor(2, dtype=torch.int16)}
    assert params_sha256(params) == hashlib.sha256(struct.pack("<hff", 2, 1.5, 2.0)).hexdigest()
    assert params_sha256({"x": torch.tensor([1.0], dtype=torch.bfloat16)}) == hashlib.sha256(b"\x80\x3f").hexdigest()
    assert params_sha256({}) == params_sha256({"empty": torch.zeros(0, 3)}) == hashlib.sha256().hexdigest()
    assert bytes(tensor_bytes(torch.tensor([1 + 2j]))) == struct.pack("<ff", 1.0, 2.0)
    assert bytes(tensor_bytes(torch.tensor([True, False]))) == b"\x01\x00"


def test_the_reference_is_a_function_of_the_seed_whatever_ran_before() -> None:
    job = make_job(model=rich)
    first = reference(job)
    torch.rand(5)
    assert_same(reference(make_job(model=rich)), first)
    assert reference(make_job(model=rich, seed=8)).sha256 != first.sha256
    assert first.step == first.version == len(first.losses) == 12
    losses = reference(make_job(steps=60)).losses
    assert sum(losses[-10:]) < sum(losses[:10]) / 2


def test_the_reference_leaves_torchs_thread_count_alone() -> None:
    before = torch.get_num_threads()
    reference(make_job(threads=2), 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor"])
def test_training_40_steps_is_training_20_and_then_20_more(optimizer: str) -> None:
    job = make_job(
        model=rich,
        optimizer=optimizer,
        optimizer_args={"lr": 0.01},
        schedule=schedule.cosine(),
        clip_norm=0.5,
        steps=40,
    )
    half = reference(job, 20)
    assert_same(reference(job, start=half), reference(job))
    assert half.step == 20


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
def test_replicas_equal_one_process_on_the_joined_batch_within_rounding(optimizer: str) -> None:
    common: dict[str, Any] = {"optimizer": optimizer, "optimizer_args": {"lr": 0.05}, "clip_norm": 0.3}
    cut = reference(make_job(replicas=3, accumulate=2, **common))
    joined = reference(make_job(replicas=1, batch_size=24, **common))
    for name, value in cut.params.items():
        torch.testing.assert_close(value, joined.params[name], rtol=1e-4, atol=1e-5)
    assert cut.losses == pytest.approx(joined.losses, rel=1e-4)


def test_one_replica_without_clipping_is_the_loop_that_anybody_would_write() -> None:
    job = make_job(replicas=1, model=rich, schedule=schedule.linear(final_factor=0.1))
    torch.manual_seed(job.seed)
    model = rich()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + (0.1 - 1.0) * min(step / 12, 1.0))
    source = BatchSource(job)
    for step in range(12):
        batch = source.batch(step, 0, 0)
        seed_everything(derive(job.seed, step, 0, 0))
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        scheduler.step()
    result = reference(job)
    assert params_sha256(dict(model.named_parameters())) == result.sha256
    assert all(torch.equal(value, result.buffers[name]) for name, value in model.named_buffers())
    for name, parameter in model.named_parameters():
        expected = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(result.optimizer[name]["momentum_buffer"], expected)


def test_asynchronous_training_by_one_worker_clips_as_torch_does() -> None:
    job = make_job(consistency="async", clip_norm=0.2, optimizer="AdamW", optimizer_args={"lr": 0.01})
    torch.manual_seed(job.seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    source = BatchSource(job)
    norms = []
    for number in range(12):
        optimizer.zero_grad()
        mse(model, source.batch(number, 0, 0)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
    assert max(norms) > 0.2
    assert params_sha256(dict(model.named_parameters())) == reference(job).sha256


def test_clipping_bounds_the_update() -> None:
    job = make_job(optimizer_args={"lr": 1.0}, clip_norm=1e-3)
    before = {name: value.detach().clone() for name, value in named_values(job.build_model()).items()}
    after = reference(job, 1).params
    moved = math.sqrt(sum(float((after[name] - value).double().square().sum()) for name, value in before.items()))
    assert moved == pytest.approx(1e-3, rel=1e-3)
    generous = make_job(clip_norm=1e6)
    assert reference(generous).sha256 == reference(make_job()).sha256, "a gradient below the bound is left alone"


def test_buffers_come_from_replica_0_alone() -> None:
    seen: dict[int, torch.Tensor] = {}
    job = make_job(model=lambda: nn.Sequential(nn.BatchNorm1d(5, momentum=1.0), nn.Linear(5, 1)), steps=1)
    source = BatchSource(job)
    for replica in range(3):
        seen[replica] = source.batch(0, replica, 0)[0].mean(dim=0)
    result = reference(job)
    torch.testing.assert_close(result.buffers["0.running_mean"], seen[0])
    assert not torch.allclose(result.buffers["0.running_mean"], seen[2])
    assert int(result.buffers["0.num_batches_tracked"]) == 1


def test_tied_weights_are_one_tensor_with_one_update() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)
            self.b = nn.Linear(5, 5)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh()).sum(dim=1, keepdim=True)

    result = reference(make_job(model=Tied))
    assert list(result.params) == ["a.weight", "a.bias", "b.bias"]
    assert list(result.optimizer) == ["a.weight", "a.bias", "b.bias"]


class Sometimes(nn.Module):
    """`late` takes part in some batches only, `never` in none; `still` needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(5, 1)
        self.late = nn.Linear(5, 1)
        self.never = nn.Linear(2, 2)
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.main(x)
        return y + self.late(x) if float(x[0, 0]) > 0 else y


def test_a_parameter_without_gradient_keeps_its_value_and_gets_no_state() -> None:
    job = make_job(model=Sometimes, optimizer="AdamW", optimizer_args={"lr": 0.01}, replicas=2)
    start, result = named_values(job.build_model()), reference(job)
    assert torch.equal(result.params["never.weight"], start["never.weight"])
    assert torch.equal(result.params["still"], start["still"])
    assert "never.weight" not in result.optimizer and "still" not in result.optimizer
    assert float(result.optimizer["main.weight"]["step"]) == 12
    assert 0 < float(result.optimizer["late.weight"]["step"]) <= 12


def explode_at(*losses: int) -> Any:
    """A loss that is NaN at the given calls, counted from 0."""
    calls = iter(range(10_000))

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        value = mse(model, batch)
        return value * float("nan") if next(calls) in losses else value

    return loss


def test_a_step_with_a_nan_is_skipped_whole_and_the_step_goes_on() -> None:
    result = reference(make_job(loss=explode_at(4), model=rich, nan_policy="skip", steps=2))
    assert (result.step, result.version, result.skipped) == (2, 1, (1,))
    assert math.isnan(result.losses[1])
    assert int(result.buffers["1.num_batches_tracked"]) == 1, "buffers are of the step before"
    assert result.sha256 == reference(make_job(model=rich), 1).sha256


def test_a_nan_stops_the_job_by_default_with_what_where_and_when() -> None:
    with pytest.raises(NonFiniteError, match="the loss of replica 1 is nan in step 1"):
        reference(make_job(loss=explode_at(4)))

    def root(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return mse(model, batch) + (model[2].bias * 0).sqrt().sum()

    with pytest.raises(NonFiniteError, match=r"gradient of '2\.bias' from replica 0 is not finite in step 0"):
        reference(make_job(loss=root))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
def test_a_fused_rule_equals_the_default_within_rounding_and_resumes(optimizer: str) -> None:
    arguments = {"lr": 0.02, "weight_decay": 0.01}
    job = make_job(optimizer=optimizer, optimizer_args={**arguments, "fused": True})
    result = reference(job)
    plain = reference(make_job(optimizer=optimizer, optimizer_args=arguments))
    for name, value in result.params.items():
        torch.testing.assert_close(value, plain.params[name], rtol=1e-4, atol=1e-5)
    for name, state in result.optimizer.items():
        assert all(v.dim() == 0 or v.shape == result.params[name].shape for v in state.values() if torch.is_tensor(v))
    assert_same(reference(job, start=reference(job, 5)), result)


def test_schedule_follows_the_step_also_over_skipped_ones() -> None:
    changes = {"nan_policy": "skip", "optimizer_args": {"lr": 0.1}, "schedule": schedule.step(1, 0.5), "replicas": 1}
    job = make_job(loss=explode_at(0), steps=2, **changes)
    result = reference(job)
    start = named_values(job.build_model())
    twice = make_job(steps=2, **{**changes, "schedule": schedule.constant(), "optimizer_args": {"lr": 0.05}})
    fresh = ReferenceResult(step=1, version=0, params=start, buffers={}, optimizer={}, losses=())
    assert result.sha256 == reference(twice, start=fresh).sha256
