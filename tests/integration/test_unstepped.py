"""A script whose loop over steps() leaves optimizer.step() out."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardline.client.api import step_loop
from shardline.client.api.stepper import MissingSteps
from shardline.errors import JobError
from tests.support.services import Services, backward, make_model

NO_STEP = r"step 3: optimizer.step\(\) was not called in \d+ passes of the loop, and replica 0 waited"


@pytest.mark.parametrize("how", ["nothing", "backward"])
def test_a_worker_for_whose_step_the_others_wait_ends_the_job(
    start: Callable[..., Services], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "MissingSteps", lambda timeout_s: MissingSteps(1.0))
    services = start(ps=2, workers=2)

    def diligent() -> None:
        session = services.connect(0)
        model = make_model()
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in session.steps(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        session.close()

    def forgetful() -> None:
        session = services.connect(1)
        model = make_model()
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))

        def train() -> None:
            for step in session.steps(6):
                # A pass takes some time, in which nothing else is kept from running.
                threading.Event().wait(0.002)
                if step < 3 or how == "backward":
                    optimizer.zero_grad()
                    backward(model, step)
                if step < 3:
                    optimizer.step()

        with pytest.raises(JobError, match=NO_STEP):
            train()
        # Not in a `with`, and the chief has been told all the same.
        session.shutdown()

    services.workers(diligent, forgetful)
    assert "worker/1: step 3: optimizer.step() was not called" in services.end(code=2)["reason"]


def test_gradients_that_are_accumulated_by_hand_are_no_error(
    start: Callable[..., Services], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker alone: nobody waits for it. The step counts what its passes added up."""
    monkeypatch.setattr(step_loop, "MissingSteps", lambda timeout_s: MissingSteps(0.0))
    services = start(ps=1, workers=1)
    session = services.connect()
    w = nn.Parameter(torch.zeros(4))
    optimizer = session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))
    passes = 0
    for _ in session.steps(3):
        (w * 1.0).sum().backward()
        passes += 1
        if passes % 150 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert passes == 450
    assert torch.allclose(w.detach(), torch.full((4,), -45.0))
    said = [text for text in caplog.messages if "passes without calling optimizer.step()" in text]
    assert len(said) == 1 and "at step 0 for 0 s and 100 passes" in said[0]
    session.close()
    services.end()
