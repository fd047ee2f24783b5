"""Gradient scalers: replicas of which one overflows make the same steps, as one process with plain torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api.session import Session
from shardline.errors import JobError
from tests.support.services import Services, batch, make_model

STEPS = 12
OVERFLOWS = {(5, 0), (7, 1)}
"""(step, replica): its loss is infinite there."""
SCALE = 1024.0


def loss_of(model: nn.Module, step: int, replica: int) -> torch.Tensor:
    points, labels = batch(step, replica)
    loss = nn.functional.cross_entropy(model(points), labels)
    return loss * float("inf") if (step, replica) in OVERFLOWS else loss


def plain_torch(*, clip: float = 0.0) -> tuple[nn.Module, float]:
    """One process that takes the mean of both replicas' gradients, each clipped by itself."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)
    for step in range(STEPS):
        found = []
        for replica in (0, 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, replica)).backward()
            if clip:
                # Unscaled and scaled again: the scaler divides by a power of two, which loses no bit.
                scale = scaler.get_scale()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= scale
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= scale
            found.append([parameter.grad for parameter in model.parameters()])
        for parameter, mine, theirs in zip(model.parameters(), *found, strict=True):
            assert mine is not None and theirs is not None
            parameter.grad = (mine + theirs) / 2
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


def run(
    session: Session, scaler: torch.amp.GradScaler, *, clip: float = 0.0, **how: Any
) -> tuple[nn.Module, list[bool]]:
    """A plain loop, as people write it; the model and which steps changed nothing."""
    model = make_model()
    optimizer = session.attach(model, torch.optim.Adam(model.parameters(), lr=0.05), **how)
    skipped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, session.replica)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(session.skipped)
    session.close()
    return model, skipped


@pytest.mark.parametrize("clip", [0.0, 0.25])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, shardline.GradScaler], ids=["torch", "shardline"])
def test_an_overflow_of_one_replica_is_skipped_by_all_as_in_plain_torch(
    start: Callable[..., Services], kind: Callable[..., torch.amp.GradScaler], clip: float
) -> None:
    expected, scale = plain_torch(clip=clip)
    services = start(ps=2, workers=2)
    scalers = [kind("cpu", init_scale=SCALE, growth_interval=4) for _ in range(2)]

    def worker(index: int) -> tuple[nn.Module, list[bool]]:
        return run(services.connect(index, nan_policy="skip"), scalers[index], clip=clip)

    ends = services.workers(lambda: worker(0), lambda: worker(1))
    for model, skipped in ends:
        assert [step for step, nothing in enumerate(skipped) if nothing] == [5, 7]
        for name, value in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    found = services.end()
    assert (found["steps"], found["skipped_steps"], found["reason"]) == (STEPS, 2, "done")
    if kind is shardline.GradScaler:
        assert [scaler.get_scale() for scaler in scalers] == [scale, scale]


def test_asynchronous_replicas_skip_each_its_own_overflow(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=2)

    def worker(index: int) -> tuple[float, list[int]]:
        scaler = shardline.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
        _, skipped = run(services.connect(index, nan_policy="skip", consistency="async"), scaler)
        return scaler.get_scale(), [step for step, nothing in enumerate(skipped) if nothing]

    assert services.workers(lambda: worker(0), lambda: worker(1)) == [(SCALE / 2, [5]), (SCALE / 2, [7])]
    services.end()


@pytest.mark.parametrize(
    ("settings", "how", "says"),
    [
        ({}, {}, r"a GradScaler needs connect\(nan_policy=\"skip\"\).*the policy of this job is \"stop\""),
        (
            {"nan_policy": "skip"},
            {"overlap": True},
            r"a GradScaler can't be combined with overlap, which would send scaled .*overlap=False",
        ),
    ],
    ids=["stop", "overlap"],
)
def test_a_scaler_that_can_not_work_is_refused_at_the_first_step(
    start: Callable[..., Services], settings: dict[str, Any], how: dict[str, Any], says: str
) -> None:
    services = start(ps=1, workers=1)
    session = services.connect(0, **settings)
    with pytest.raises(JobError, match=says) as found:
        run(session, torch.amp.GradScaler("cpu", init_scale=SCALE), **how)
    assert session.step == 0
    session.fail(found.value)
    session.shutdown()
    services.end(code=2)
