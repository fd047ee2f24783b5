"""shardline check: a job in plain PyTorch beside the same job through a chief, servers and a worker in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from shardline import schedule
from shardline.cli.main import main
from shardline.config import RoleConfig
from shardline.errors import NonFiniteError, UsageError
from shardline.job import Job
from shardline.testing import reference
from shardline_chief import service as chief
from shardline_lab.comparison.difference import Difference, differences
from shardline_lab.comparison.plain import PlainTraining, checked_job
from shardline_lab.comparison.served import InProcessCluster, train_served
from shardline_ps import service as ps
from tests.support.jobs import Rich, make_job, mse
from tests.support.services import TIMEOUTS

CPU = torch.device("cpu")
ROLES: dict[str, Callable[[RoleConfig], int]] = {"chief": chief.run, "ps": ps.run}


def compare(job: Job, out: Path, **settings: Any) -> list[Difference]:
    expected = PlainTraining(job, CPU).run(job.steps)
    return differences(
        expected, train_served(job, InProcessCluster(role=ROLES.__getitem__, out=out, timeouts=TIMEOUTS, **settings))
    )


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=4, base_momentum=0.6, max_momentum=0.9)


def warmed_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=2), ExponentialLR(optimizer, 0.5)], [2])


def by_group(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0 + step])


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]


JOBS: dict[str, dict[str, Any]] = {
    "a scheduler that cycles momentum": {"scheduler": one_cycle},
    "a scheduler that cycles betas": {"scheduler": one_cycle, "optimizer": "adamw", "apply": "worker"},
    "schedulers in sequence": {"scheduler": warmed_up, "optimizer": "adam", "model": Rich},
    "a scheduler with a curve per group": {"scheduler": by_group, "param_groups": two_groups},
    "all that a model may have": {"model": Rich, "accumulate": 2, "batch_size": 2},
    "clipping and a schedule": {"optimizer": "adamw", "clip_norm": 0.05, "schedule": schedule.cosine(warmup_steps=2)},
    "one replica": {"replicas": 1, "model": Rich},
    "worker's optimizer": {"optimizer": "nesterov", "apply": "worker"},
    "an optimizer from outside torch": {
        **{"optimizer": "lion", "apply": "worker"},
        **{"scheduler": by_group, "param_groups": two_groups},
    },
}


@pytest.mark.parametrize("case", JOBS)
def test_a_job_has_the_bits_of_plain_torch(case: str, tmp_path: Path) -> None:
    settings = dict(JOBS[case])
    job = checked_job(make_job(settings.pop("optimizer", "momentum"), **settings), 3).job
    assert not compare(job, tmp_path)


def test_a_scheduler_counts_the_batches_of_an_asynchronous_job(tmp_path: Path) -> None:
    job = make_job("sgd", consistency="async", steps=6, scheduler=warmed_up)
    cluster = InProcessCluster(role=ROLES.__getitem__, out=tmp_path, timeouts=TIMEOUTS)
    assert not differences({6: reference(job).params}, {6: train_served(job, cluster)[6]})


def test_an_asynchronous_worker_runs_an_optimizer_from_outside_torch(tmp_path: Path) -> None:
    job = make_job("lion", consistency="async", apply="worker", steps=6)
    served = train_served(job, InProcessCluster(role=ROLES.__getitem__, out=tmp_path, timeouts=TIMEOUTS))
    assert not differences({6: reference(make_job("lion", replicas=1, apply="worker", steps=6)).params}, {6: served[6]})


def test_figures_beside_a_loss_are_logged(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        found = mse(model, batch)
        return {"loss": found, "root": found.detach().sqrt(), "two": 2, "logits": torch.zeros(3), "name": "x"}

    job = make_job(loss=loss, steps=3)
    assert not compare(job, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "steps.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["logged"]["two"] == 2.0 and 0.0 < line["logged"]["root"] < 10.0
        assert not {"loss", "logits", "name"} & line["logged"].keys()


def test_what_plain_torch_has_no_equal_for_is_left_out_and_named() -> None:
    job = make_job(consistency="async", codec="bf16", cadence="every-step", schedule=schedule.linear())
    checked = checked_job(job, 3)
    assert checked.replaced == ("consistency=async", "codec=bf16")
    assert (checked.job.consistency, checked.job.codec, checked.job.steps) == ("sync", "raw", 3)
    assert checked.job.schedule.total_steps == job.steps, "the curve is that of the whole job"
    assert checked_job(make_job(codec="lossless"), 3).replaced == ()


def test_a_chief_that_does_not_start_ends_the_comparison_with_its_error(tmp_path: Path) -> None:
    def refuse(config: RoleConfig) -> int:
        raise UsageError("no room for the chief")

    cluster = InProcessCluster(role=lambda name: refuse, out=tmp_path, timeouts=TIMEOUTS)
    with pytest.raises(UsageError, match="no room for the chief"):
        train_served(make_job(), cluster)


def test_a_nan_ends_the_comparison_as_it_ends_the_job() -> None:
    job = make_job(loss=lambda model, batch: model(batch[0]).sum() * math.nan)
    with pytest.raises(NonFiniteError, match=r"in step 0, replica 0, the loss, the gradient of '0\.weight'"):
        PlainTraining(job, CPU).run(1)


def test_differences_name_the_first_step_and_the_largest_gap() -> None:
    one = torch.ones(1)

    def values(a: list[float], b: list[float], **more: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": torch.tensor(a), "b": torch.tensor(b), **more}

    expected = dict(enumerate([values([1.0, 2.0], [0.0]), values([1.5, 2.5], [0.0]), values([2.0, 3.0], [0.0])]))
    found = dict(enumerate([values([1.0, 2.0], [0.0]), values([1.5, 2.5], [-0.0]), values([2.0, 3.25], [0.0], c=one)]))
    assert [str(one) for one in differences(expected, found)] == [
        "b: from step 1 on; after step 1 by at most 0, in 0 of 1 elements",
        "c: from step 2 on, only the servers have it",
        "a: from step 2 on; after step 2 by at most 0.25, in 1 of 2 elements",
    ]
    assert not differences(expected, expected)


JOB = """
import torch
from torch.utils.data import TensorDataset
from shardline import Job
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
{extra}
def loss(model, batch):
    {first}
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
job = Job(model=lambda: torch.nn.Linear(4, 1), loss=loss, dataset=TensorDataset(x, x.sum(1, keepdim=True)),
          batch_size=4, replicas=2, steps=40, optimizer="SGD", optimizer_args={{"lr": 0.1}})
"""


def job_file(folder: Path, *, extra: str = "", first: str = "pass") -> str:
    path = folder / "job.py"
    path.write_text(JOB.format(extra=extra, first=first))
    return str(path)


def test_the_command_says_in_a_line_that_the_bits_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # An operator can be registered once in a process.
    job = job_file(tmp_path, extra='torch.library.define("shardline_check::sq", "(Tensor x) -> Tensor")')
    assert main(["check", job, "--steps", "2", "--consistency", "async", "--lane", "tcp"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "compared without consistency=async, which plain PyTorch has no equal for: synchronous, an exchange in every "
        "step, exact bytes",
        "2 steps: equal bits in 2 tensors",
    ]


def test_the_command_lists_the_tensors_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(job: Job, cluster: InProcessCluster) -> dict[int, dict[str, torch.Tensor]]:
        found = PlainTraining(job, CPU).run(job.steps)
        if cluster.overlap and job.steps > 1:
            found[job.steps]["bias"] += 0.5
        return {step: found[step] for step in (0, job.steps)}

    monkeypatch.setattr("shardline_lab.comparison.served.train_served", served)
    assert main(["check", job_file(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "3 steps: 1 of 2 tensors differ",
        "  bias: from step 2 on; after step 3 by at most 0.5, in 1 of 1 elements",
        "with --no-overlap the bits are equal",
    ]


def test_errors_of_the_job_end_the_command_as_they_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", job_file(tmp_path, first="raise ValueError('no such word')")]) == 2
    assert "loss(model, batch), in step 0 of replica 0, raised ValueError: no such word" in capsys.readouterr().err


def test_a_job_that_plain_torch_itself_ends_elsewhere_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = job_file(tmp_path, extra="import secrets", first="batch[0] = batch[0] * secrets.randbelow(1 << 30)")
    assert main(["check", random, "--steps", "1"]) == 2
    assert "plain PyTorch itself trains 'weight' to other values when it runs again, first in step 1" in (
        capsys.readouterr().err
    )
