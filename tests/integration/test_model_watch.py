"""Changes to the model while it is trained, in other modes than those of tests/models; also warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardline.client.job_loop import WatchedLoss
from shardline.client.watch.model_watch import EVERY
from shardline.errors import JobError
from shardline.model import model_tensors, named_values
from shardline.testing import reference
from tests.models.changes import Change, Watched, assign_buffers, clone_parameters, perturb_and_undo, write_and_undo
from tests.models.row import job as make_job
from tests.support.cluster import Cluster, assert_same_end
from tests.support.overlap import OverlapWorker
from tests.support.services import Services, backward, make_model

pytestmark = pytest.mark.usefixtures("no_push_is_small")
SMALL_BUCKETS = 256
STEPS = 4
LATE = 2 * EVERY + 2
"""A step after some in which all values were compared."""


def test_a_pass_that_is_repeated_begins_with_the_buffers_of_its_step() -> None:
    job = make_job(Change(assign_buffers).model, replicas=1, steps=STEPS)()
    with Cluster(job, ps=1) as cluster:
        worker = cluster.worker(0)
        worker.run([0], 2)
        # As a pass leaves it that is given up in the middle.
        worker.model.mean = torch.full((8,), float("nan"))
        worker.run([0], STEPS)
        assert_same_end(cluster.state(), reference(job))


def test_replicas_with_parameters_of_their_own_may_write_to_them() -> None:
    def clip(model: Watched, number: int) -> None:
        with torch.no_grad():
            model.last.weight.clamp_(-0.1, 0.1)

    model = Change(clip, before=True).model
    job = make_job(model, replicas=1, steps=3, cadence="local-sgd:every=2")()
    with Cluster(job, ps=1) as cluster:
        worker = cluster.worker(0)
        worker.run([0], 3)
        assert worker.trainer.step == 3


def habit(model: Watched, number: int) -> None:
    if number >= LATE:
        model.last.weight.data.clamp_(-0.01, 0.01)


def once_into_frozen(model: Watched, number: int) -> None:
    if number == LATE:
        model.frozen.weight.data += 1.0


def once_while_frozen(model: Watched, number: int) -> None:
    model.first.requires_grad_(number < 3)
    if number == LATE:
        model.first.weight.data += 1.0


@pytest.mark.parametrize(
    ("overlap", "act", "name"),
    [
        (False, habit, "last.weight"),
        (True, once_into_frozen, "frozen.weight"),
        (False, once_while_frozen, "first.weight"),
        pytest.param(True, habit, "last.weight", marks=pytest.mark.long),
        pytest.param(False, once_into_frozen, "frozen.weight", marks=pytest.mark.long),
        pytest.param(True, once_while_frozen, "first.weight", marks=pytest.mark.long),
    ],
)
def test_a_write_through_data_that_lasts_is_found_whenever_it_begins(
    overlap: bool, act: Callable[[Watched, int], None], name: str
) -> None:
    job = make_job(Change(act).model, replicas=1, steps=LATE + EVERY)()
    with Cluster(job, ps=1, bucket_bytes=SMALL_BUCKETS) as cluster:
        worker = OverlapWorker(cluster, 0) if overlap else cluster.worker(0)
        if overlap:
            cluster.workers.append(worker)
        with pytest.raises(JobError, match=f"'{name}' was written to in this process") as found:
            worker.run([0], job.steps)
        assert str(found.value).startswith(f"step {3 * EVERY - 1}: ")


@pytest.mark.parametrize(("optimizer", "settings"), [("SGD", {"lr": 0.05, "momentum": 0.9}), ("AdamW", {"lr": 0.01})])
def test_what_a_workers_own_optimizer_writes_is_not_taken_for_the_users(
    optimizer: str, settings: dict[str, float]
) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))

    job = make_job(wide, replicas=1, steps=3, apply="worker", optimizer=optimizer, optimizer_args=settings)()
    # Some buckets are one tensor, and are written where that is.
    with Cluster(job, ps=1, bucket_bytes=SMALL_BUCKETS) as cluster:
        worker = cluster.worker(0)
        worker.run([0], job.steps)
        expected = reference(job)
        for name, value in named_values(worker.model).items():
            assert torch.equal(value, expected.params[name]), name


def test_parameters_that_the_loss_uses_and_the_model_has_not_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    data = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (model(batch) - other(batch)).square().mean()
        return found

    first = WatchedLoss(loss, dict)
    for _ in range(2):
        first(model, data)
    assert [text for text in caplog.messages if "2 parameters that are not in the model" in text and "(1, 2)" in text]
    assert len(caplog.messages) == 1
    caplog.clear()
    # Inputs that need gradients, and frozen parameters, are nothing to speak of.
    other.requires_grad_(False)
    WatchedLoss(loss, dict)(model, data.clone().requires_grad_())
    assert not caplog.messages


# A loop of the user's own


def plain(steps: int, act: Callable[[nn.Module, torch.optim.Optimizer, int], None], **settings: Any) -> nn.Module:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **settings)
    loop(model, optimizer, steps, act)
    return model


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    act: Callable[[nn.Module, torch.optim.Optimizer, int], None],
) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps + 1)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        act(model, optimizer, step)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("how", ["zero_copy", "async"])
def test_a_loop_of_the_users_own_may_move_average_perturb_and_schedule(
    start: Callable[..., Services], how: str
) -> None:
    averages: list[AveragedModel] = []

    def act(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            averages.append(AveragedModel(model))
        averages[-1].update_parameters(model)
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        if step == 2:
            clone_parameters(model, step)
        if step == 3:
            write_and_undo(model, step)
        if step >= 5:
            perturb_and_undo(model, step)

    services = start(ps=2, workers=1)
    session = services.connect(consistency="async") if how == "async" else services.connect()
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = session.attach(model, inner, zero_copy=how == "zero_copy")
    loop(model, optimizer, 8, act)
    session.close()
    services.end()
    expected = plain(8, act, momentum=0.9)
    for name, value in named_values(expected).items():
        assert torch.equal(named_values(model)[name], value), name
    ours, theirs = averages
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_was_refused_is_done_once_the_change_is_undone(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    session = services.connect()
    model = make_model()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    group = optimizer.param_groups[0]
    for _ in session.steps(3):
        backward(model, 0)
        group["nesterov"] = True
        with pytest.raises(JobError, match="nesterov of parameter group 0 is True and was False"):
            optimizer.step()
        group["nesterov"] = False
        with pytest.raises(JobError, match="no 'momentum_buffer' in this process"):
            optimizer.state[group["params"][0]]["momentum_buffer"]
        optimizer.step()
    assert session.step == 3
    # Such a dict is loaded without classes of Shardline.
    assert all(type(value) is dict for value in optimizer.state_dict()["state"].values())
    session.close()
    services.end()


def test_a_frozen_parameter_of_a_group_need_not_be_in_the_model() -> None:
    model, temperature = make_model(), nn.Parameter(torch.tensor(0.5), requires_grad=False)
    assert len(model_tensors(model, [{"params": list(model.parameters())}, {"params": [temperature]}])) == 4
