"""An attached optimizer's state lies on the servers: what state_dict() and load_state_dict() say of that."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardline.client.api.session import Session
from shardline.errors import JobError
from tests.support.services import Services, backward, make_model


def attached(services: Services, **settings: Any) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    session, model = services.connect(**settings), make_model()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    return session, model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """As a Trainer saves it and reads it again."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def fail(session: Session, error: JobError) -> None:
    session.fail(error)
    session.shutdown()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_state_dict_says_at_which_step_the_servers_hold_the_rest(
    start: Callable[..., Services], caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=2, workers=1)
    session, model, optimizer = attached(services)
    with caplog.at_level(logging.WARNING, "shardline"):
        # As accelerate does with every optimizer that it is given.
        optimizer.load_state_dict(optimizer.state_dict())
        assert warnings(caplog) == []
        train(model, optimizer, 3)
        optimizer.param_groups[0]["lr"] = 0.01
        state = optimizer.state_dict()
        optimizer.state_dict()
    assert (state["state"], state["shardline"]["step"]) == ({}, 3)
    assert warnings(caplog) == [
        "state_dict() has only the parameter groups of step 3: optimizer state such as momentum is on the servers and "
        "in the checkpoints of the job"
    ]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(saved(state))
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, 1)
    session.close()
    services.end()


def test_a_state_of_another_step_is_refused_with_both_numbers(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    train(model, optimizer, 2)
    state = saved(optimizer.state_dict())
    train(model, optimizer, 1)
    with pytest.raises(
        JobError, match=r"saved at step 2, but the job and .* are at step 3.*--resume.*resume_from_checkpoint"
    ):
        optimizer.load_state_dict(state)
    session.close()
    services.end()


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_state_that_was_saved_in_an_earlier_run_is_refused_where_the_job_begins_at_0(
    start: Callable[..., Services], consistency: str
) -> None:
    services = start(ps=1, workers=1)
    session, _, optimizer = attached(services, consistency=consistency)
    state = saved(optimizer.state_dict())
    state["shardline"] = {**state["shardline"], "step": 300, "incarnation": 7}
    with pytest.raises(JobError, match=r"saved at step 300, but the job and .* are at step 0") as found:
        optimizer.load_state_dict(state)
    fail(session, found.value)
    services.end(code=2)


def test_state_of_a_plain_optimizer_is_refused_and_its_groups_alone_are_not(start: Callable[..., Services]) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    fresh = plain.state_dict()
    train(model, plain, 2)
    services = start(ps=1, workers=1)
    session, _, optimizer = attached(services)
    with pytest.raises(JobError, match=r"momentum_buffer of 4 parameters.*on the servers.*--resume"):
        optimizer.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(fresh)
    assert optimizer.param_groups[0]["lr"] == 0.3
    session.close()
    services.end()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer of 4 parameters"),
        (lambda p: torch.optim.Adam(p, lr=0.1), "exp_avg, exp_avg_sq, step of 4 parameters"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), "step, sum of 4 parameters"),
    ],
    ids=["SGD", "Adam", "Adagrad"],
)
def test_an_optimizer_that_has_made_steps_is_not_attached_to_a_job_that_begins(
    start: Callable[..., Services], make: Callable[..., torch.optim.Optimizer], says: str
) -> None:
    services = start(ps=1, workers=1)
    model, session = make_model(), services.connect()
    used = make(model.parameters())
    train(model, used, 2)
    with pytest.raises(JobError, match=rf"{says}.*the servers start without") as found:
        session.attach(model, used)
    fail(session, found.value)
    services.end(code=2)


def test_an_optimizer_that_is_made_with_state_may_be_attached(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    model, session = make_model(), services.connect()
    # Its accumulators are there from the beginning.
    optimizer = session.attach(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    train(model, optimizer, 2)
    session.close()
    services.end()
