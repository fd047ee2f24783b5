"""A loop with accelerate as a worker's: prepare(), save_state(), and the scaler that it gives its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api.session import Session
from shardline.errors import JobError
from tests.integration.test_scaler import SCALE, STEPS, loss_of, plain_torch
from tests.support.services import Services, batch, make_model

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; make test-scripts does it")


def loop(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    model, prepared = accelerator.prepare(model, optimizer)
    for step in range(steps):
        points, labels = batch(step)
        prepared.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(points), labels))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        prepared.step()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def attached(services: Services) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    session, model = services.connect(), make_model()
    return session, model, session.attach(model, make_optimizer(model))


def test_a_loop_with_accelerate_trains_as_without_shardline(
    start: Callable[..., Services], caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_model()
    loop(accelerate.Accelerator(cpu=True), plain, make_optimizer(plain), 6)
    services = start(ps=2, workers=1)
    session, model, optimizer = attached(services)
    loop(accelerate.Accelerator(cpu=True), model, optimizer, 6)
    session.close()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not [text for text in caplog.messages if "state_dict()" in text or "written to" in text]
    assert services.end()["steps"] == 6


def test_a_loop_with_accelerate_reads_its_data_in_forked_processes(start: Callable[..., Services]) -> None:
    whole = torch.utils.data.TensorDataset(*batch(0))

    def passes(model: nn.Module, optimizer: torch.optim.Optimizer, workers: int) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        data = accelerator.prepare(torch.utils.data.DataLoader(whole, batch_size=4, num_workers=workers))
        for _ in range(2):
            for points, labels in data:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(points), labels))
                optimizer.step()

    plain = make_model()
    passes(plain, make_optimizer(plain), 0)
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    passes(model, optimizer, 2)
    session.close()
    services.end()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_what_accelerate_saved_is_loaded_at_the_same_step_only(start: Callable[..., Services], tmp_path: Path) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = attached(services)
    accelerator = accelerate.Accelerator(cpu=True)
    loop(accelerator, model, optimizer, 3)
    accelerator.save_state(str(tmp_path / "saved"))
    accelerator.load_state(str(tmp_path / "saved"))
    optimizer.zero_grad()
    points, labels = batch(3)
    nn.functional.cross_entropy(model(points), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with pytest.raises(JobError, match=r"saved at step 3, but the job and .* are at step 4"):
        accelerator.load_state(str(tmp_path / "saved"))
    session.close()
    services.end()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, shardline.GradScaler], ids=["torch", "shardline"])
def test_an_overflow_of_one_replica_is_skipped_by_all_through_accelerates_optimizer(
    start: Callable[..., Services], kind: Callable[..., torch.amp.GradScaler]
) -> None:
    expected, scale = plain_torch()
    services = start(ps=2, workers=2)
    accelerate.Accelerator(cpu=True)
    scalers = [kind("cpu", init_scale=SCALE, growth_interval=4) for _ in range(2)]

    def worker(index: int) -> nn.Module:
        session, model = services.connect(index, nan_policy="skip"), make_model()
        # As Accelerator.prepare does with mixed_precision="fp16", which it refuses without a GPU.
        optimizer = accelerate.optimizer.AcceleratedOptimizer(
            session.attach(model, make_optimizer(model)), scaler=scalers[index]
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            scalers[index].scale(loss_of(model, step, index)).backward()
            optimizer.step()
        session.close()
        return model

    for model in services.workers(lambda: worker(0), lambda: worker(1)):
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    found = services.end()
    assert (found["steps"], found["skipped_steps"]) == (STEPS, 2)
    if kind is shardline.GradScaler:
        assert [scaler.get_scale() for scaler in scalers] == [scale, scale]
