"""Whose gradient is clipped, by connect(clip_norm=...) and by torch before step(): the table in scripts.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.services import Services, batch, make_model

STEPS, CLIP = 6, 0.1


def gradients(model: nn.Module, step: int, replica: int, *, clip: bool) -> list[torch.Tensor]:
    points, labels = batch(step, replica)
    model.zero_grad()
    nn.functional.cross_entropy(model(points), labels).backward()  # type: ignore[no-untyped-call]
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def one_process(*, each: bool) -> dict[str, torch.Tensor]:
    """Plain torch over both replicas' samples. each: their gradients are clipped by themselves, not their mean."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        mine, theirs = (gradients(model, step, replica, clip=each) for replica in (0, 1))
        for parameter, one, other in zip(model.parameters(), mine, theirs, strict=True):
            parameter.grad = (one + other) / 2
        if not each:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict()


def cluster(services: Services, workers: int, *, own: bool, **settings: str) -> dict[str, torch.Tensor]:
    """The same as a script. own: it calls torch's function, where else the session has clip_norm."""

    def worker(index: int) -> dict[str, torch.Tensor]:
        session, model = services.connect(index, clip_norm=0.0 if own else CLIP, **settings), make_model()
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for step in session.steps(STEPS):
            gradients(model, step, index, clip=own)
            optimizer.step()
        session.close()
        return model.state_dict()

    found = services.workers(*(lambda index=index: worker(index) for index in range(workers)))  # type: ignore[misc]
    services.end()
    return found[0]


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        # The norm is summed in another order.
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_clip_norm_of_a_synchronous_script_clips_the_mean_as_one_process_does(start: Callable[..., Services]) -> None:
    assert_close(cluster(start(ps=2, workers=2), 2, own=False), one_process(each=False))


def test_torchs_own_clipping_in_a_synchronous_script_clips_before_the_mean(start: Callable[..., Services]) -> None:
    expected = one_process(each=True)
    assert_close(cluster(start(ps=2, workers=2), 2, own=True), expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(expected, one_process(each=False))


def test_both_are_the_same_in_an_asynchronous_script(start: Callable[..., Services]) -> None:
    results = [cluster(start(out=str(own), ps=1, workers=1), 1, own=own, consistency="async") for own in (False, True)]
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name
