"""What a loop of a person's own is told that it would otherwise not notice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api.session import Session
from shardline.errors import JobError, UsageError
from tests.support.services import Services, backward, make_model

GOES_ON = "the job continues at step 3, but this script has neither read that"


def attached(
    services: Services, model: nn.Module, *, settings: dict[str, Any] | None = None, **how: Any
) -> tuple[Session, torch.optim.Optimizer]:
    session = services.connect(**(settings or {}))
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
def test_values_that_are_written_after_attach_end_the_job(start: Callable[..., Services], overlap: bool) -> None:
    services = start(ps=2, workers=1)
    model = make_model()
    session, optimizer = attached(services, model, overlap=overlap)
    other = {name: value + 1.0 for name, value in model.state_dict().items()}
    make_steps(model, optimizer, 3)
    # As a Trainer does that goes on from a checkpoint of its own.
    model.load_state_dict(other)
    with pytest.raises(JobError, match=r"step 3: '0.weight' and 3 more were written to in this process") as found:
        make_steps(model, optimizer, 1)
    session.fail(found.value)
    session.shutdown()
    services.end(code=2)


def test_statistics_of_a_batch_norm_are_changed_by_each_pass_and_no_matter(
    start: Callable[..., Services], caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=1, workers=1)
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    session, optimizer = attached(services, model)
    make_steps(model, optimizer, 3)
    session.close()
    assert not [text for text in caplog.messages if "written to in this process" in text]
    services.end()


def until_stopped(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> shardline.JobStopped:
    """Stop the job and go on as a Trainer does; returns what ends its loop."""
    session.link.client.stop("enough")
    return refused(model, optimizer, 5_000)


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> shardline.JobStopped:
    """The exception that ends a loop of `count` steps."""
    with pytest.raises(shardline.JobStopped) as found:
        make_steps(model, optimizer, count)
    return found.value


@pytest.mark.parametrize("consistency", ["sync", "async", "softsync:n=1"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_that_goes_on_after_the_end_of_the_job_is_ended_with_the_step(
    start: Callable[..., Services], overlap: bool, consistency: str, caplog: pytest.LogCaptureFixture
) -> None:
    services = start(ps=2, workers=1)
    model = make_model()
    session, optimizer = attached(services, model, settings={"consistency": consistency}, overlap=overlap)
    make_steps(model, optimizer, 3)
    stopped = until_stopped(session, model, optimizer)
    assert refused(model, optimizer, 1).step == stopped.step
    # As at the end of a `with` block that it leaves.
    session.__exit__(type(stopped), stopped, None)
    assert (stopped.code, isinstance(stopped, Exception)) == (0, False)
    found = services.end()
    assert (found["checkpoint_step"], found["reason"]) == (stopped.step, "stopped: enough")
    said = [text for text in caplog.messages if text == str(stopped)]
    assert len(said) == 1 and f"the job ended at step {stopped.step} (stopped: enough)" in said[0]


def test_a_push_after_the_end_of_the_job_is_refused_and_a_loop_over_steps_ends(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    with services.connect() as session:
        w = nn.Parameter(torch.zeros(4))
        session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))
        for step in session.steps():
            session.push({"w": torch.ones(4)})
            if step == 2:
                session.link.client.stop("enough")
        with pytest.raises(shardline.JobStopped, match=rf"the job ended at step {session.step} \(stopped: enough\)"):
            session.push({"w": torch.ones(4)})
    services.end()


def test_a_loop_that_goes_on_after_another_worker_has_failed_is_ended_with_the_reason(
    start: Callable[..., Services],
) -> None:
    services = start(ps=1, workers=2)

    def fails() -> None:
        model = make_model()
        session, optimizer = attached(services, model)
        make_steps(model, optimizer, 2)
        session.fail(JobError("the data is not there"))
        session.shutdown()

    def goes_on() -> None:
        model = make_model()
        session = services.connect(1)
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
        assert re.search("worker/1: .*at step 2 .*the data is not there", str(refused(model, optimizer, 4)))
        session.close()

    services.workers(fails, goes_on)
    services.end(code=2)


def test_a_step_after_close_is_refused(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    model = make_model()
    session, optimizer = attached(services, model)
    make_steps(model, optimizer, 2)
    session.close()
    with pytest.raises(UsageError, match="worker/0: this session is closed"):
        make_steps(model, optimizer, 1)
    services.end()


@pytest.mark.parametrize("later", [0, 3])
def test_a_state_that_is_ahead_of_its_stopped_job_is_refused_where_the_job_goes_on(
    start: Callable[..., Services], later: int
) -> None:
    services = start(ps=1, workers=1)
    model = make_model()
    session, optimizer = attached(services, model)
    stopped = until_stopped(session, model, optimizer)
    for _ in range(later):
        # As in a loop that catches everything.
        refused(model, optimizer, 1)
    state = optimizer.state_dict()
    session.close()
    services.end()

    services = start(ps=1, workers=1, resume=True)
    session, optimizer = attached(services, model)
    assert state["shardline"]["step"] == session.step == stopped.step
    if later:
        with pytest.raises(JobError, match=rf"ahead of the job.* {later} times since step {stopped.step}"):
            optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(state)
        make_steps(model, optimizer, 1)
    session.close()
    services.end()


@pytest.mark.parametrize("passes", [8, 10])
def test_a_state_within_a_round_is_refused_where_the_job_goes_on_at_its_beginning(
    start: Callable[..., Services], passes: int
) -> None:
    services = start(ps=1, workers=1)
    model = make_model()
    cadence = {"cadence": "local-sgd:every=4"}
    session, optimizer = attached(services, model, settings=cadence)
    make_steps(model, optimizer, passes)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    session.shutdown()

    session, optimizer = attached(services, model, settings=cadence)
    if passes % 4:
        with pytest.raises(JobError, match=r"ahead of the job.* 2 times since step 2"):
            optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(state)
    session.close()
    services.end()
