"""connect() without a cluster: the loop of a script in one process, with the bits of a cluster of one worker."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api.session import Session
from shardline.errors import ClusterSpecError, JobError, UsageError
from tests.support.services import Services, backward, make_model

STEPS = 6
SAID = "no cluster is given: training in this process alone"


def train(session: Session) -> nn.Module:
    """A loop with named tensors, a barrier and a skipped step."""
    model = make_model()
    optimizer = session.attach(model, torch.optim.Adam(model.parameters(), lr=0.05))
    assert (session.replica, session.num_replicas) == (0, 1)
    session.push({"0.bias": torch.ones(16)})
    assert torch.equal(session.pull(["0.bias"])["0.bias"], model.state_dict()["0.bias"])
    skipped = []
    for step in session.steps(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        session.log_loss(0.5)
        optimizer.step()
        skipped.append(session.skipped)
        assert session.barrier()
    assert skipped == [step == 2 for step in range(1, STEPS)]
    session.close()
    return model


def test_a_script_without_a_cluster_ends_in_the_bits_of_a_cluster_of_one_worker(
    start: Callable[..., Services], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"clip_norm": 0.5, "nan_policy": "skip", "checkpoint_every": 2}
    services = start(ps=2, workers=1)
    expected = train(services.connect(**settings))
    services.end()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    threads = torch.get_num_threads()
    session = shardline.connect(**settings)  # type: ignore[arg-type]
    assert torch.get_num_threads() == threads
    with pytest.raises(UsageError, match="connected as worker/0 already; close that session before"):
        shardline.connect()
    model = train(session)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert capsys.readouterr().err.count(SAID) == 1
    assert not [*(tmp_path / "temporary").iterdir()]


def test_a_script_that_fails_alone_leaves_nothing(
    start: Callable[..., Services], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def spoil() -> None:
        with shardline.connect() as session:
            model = make_model()
            optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            backward(model, 0)
            optimizer.step()
            with torch.no_grad():
                next(model.parameters()).zero_()
            optimizer.step()

    with pytest.raises(JobError, match="written to in this process"):
        spoil()
    # Before it has attached a model.
    shardline.connect().close()
    assert not [*tmp_path.iterdir()]


def test_one_of_several_processes_does_not_train_alone(
    start: Callable[..., Services], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ClusterSpecError, match=r"WORLD_SIZE=4 .*shardline train --script .* instead of torchrun"):
        shardline.connect()


def test_a_task_without_a_cluster_is_still_a_mistake(start: Callable[..., Services]) -> None:
    with pytest.raises(ClusterSpecError, match="no cluster given"):
        shardline.connect(task="worker/0")
