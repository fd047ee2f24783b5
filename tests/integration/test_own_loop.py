"""What a loop of a person's own is told that it would otherwise not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardline.client.api.session import Session
from tests.support.services import Services, backward, make_model

GOES_ON = "the job continues at step 3, but this script has neither read that"
CHANGED = "the values of 0.weight and 3 more tensors were changed in this process since the last step"


def attached(services: Services, model: nn.Module, **how: bool) -> tuple[Session, torch.optim.Optimizer]:
    session = services.connect()
    return session, session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), **how)


def make_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("how", ["counts from 0", "asks", "loads", "loops over steps"])
def test_a_loop_that_does_not_know_that_the_job_goes_on_is_told(
    start: Callable[..., Services], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=1, workers=1)
    first = make_model()
    session, optimizer = attached(services, first)
    make_steps(first, optimizer, 3)
    state = optimizer.state_dict()
    # Killed, and started again.
    session.shutdown()

    caplog.clear()
    model = make_model()
    session, optimizer = attached(services, model)
    # As accelerate does: what is saved and loaded by one process says nothing.
    optimizer.load_state_dict(optimizer.state_dict())
    if how == "loads":
        optimizer.load_state_dict(state)
    if how == "loops over steps":
        for step in session.steps(5):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    else:
        begin = session.step if how == "asks" else 3
        make_steps(model, optimizer, 5 - begin)
    assert sum(GOES_ON in text for text in caplog.messages) == (how == "counts from 0"), caplog.messages
    session.close()
    services.end()


@pytest.mark.parametrize("overlap", [False, True])
def test_values_that_are_written_after_attach_are_said_to_be_lost(
    start: Callable[..., Services], overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=2, workers=1)
    model = make_model()
    session, optimizer = attached(services, model, overlap=overlap)
    other = {name: value + 1.0 for name, value in model.state_dict().items()}
    make_steps(model, optimizer, 2)
    assert not [text for text in caplog.messages if "were changed in this process" in text]
    # As a Trainer does that goes on from a checkpoint of its own.
    model.load_state_dict(other)
    make_steps(model, optimizer, 2)
    model.load_state_dict(other)
    make_steps(model, optimizer, 1)
    said = [text for text in caplog.messages if "were changed in this process" in text]
    assert len(said) == 1 and said[0].startswith(CHANGED)
    assert session.step == 5
    session.close()
    services.end()


def test_statistics_of_a_batch_norm_are_changed_by_each_pass_and_no_matter(
    start: Callable[..., Services], caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=1, workers=1)
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    session, optimizer = attached(services, model)
    make_steps(model, optimizer, 3)
    session.close()
    assert not [text for text in caplog.messages if "were changed in this process" in text]
    services.end()
