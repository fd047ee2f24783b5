"""A person's own loop: connect, attach, step, LR schedulers and named tensors, with a chief and two servers behind it.

All roles run as threads of this process; the sockets between them are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api import connect as connecting
from shardline.client.api.session import Session
from shardline.client.api.stepper import Do
from shardline.client.exchange.shard_exchange import Restart
from shardline.errors import JobError, MismatchError, NonFiniteError, TensorError, UsageError
from tests.support.jobs import make_job
from tests.support.services import TIMEOUTS, Services, backward, batch, make_model
from tests.support.waiting import wait_for


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int]) -> list[float]:
    """A plain training loop with a scheduler; the rates it used."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    rates = []
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


def test_a_loss_that_is_logged_may_be_the_tensor_itself(start: Callable[..., Services]) -> None:
    model = make_model()
    with start(ps=1, workers=1).connect() as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in session.steps(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            session.log_loss(loss)
            optimizer.step()


def test_logged_figures_and_the_learning_rate_are_in_the_log_of_steps(
    start: Callable[..., Services], tmp_path: Path
) -> None:
    model, services = make_model(), start(ps=1, workers=1)
    session = services.connect()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
    norms = []
    for step in session.steps(12):
        optimizer.zero_grad()
        backward(model, step)
        norms.append(float(torch.stack([one.grad.norm() for one in model.parameters()]).norm()))
        session.log({"accuracy": 0.1})
        session.log({"accuracy": torch.tensor([step / 10]), "entropy": 2})
        if step == 6:
            optimizer.param_groups[0]["lr"] = 0.25
        optimizer.step()
    with pytest.raises(UsageError, match=r"the limit is 32"):
        session.log({f"figure{number}": 1.0 for number in range(33)})
    with pytest.raises(UsageError, match=r"accuracy is 'high'; give a number or a tensor of one element"):
        session.log({"accuracy": "high"})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"give a text of 1 to 64 bytes"):
        session.log({"x" * 65: 1.0})
    session.close()
    services.end()
    lines = [json.loads(line) for line in (tmp_path / "logs" / "steps.jsonl").read_text().splitlines()]
    found = [line["logged"] for line in lines]
    assert [one["accuracy"] for one in found] == pytest.approx([step / 10 for step in range(12)])
    assert [one["entropy"] for one in found] == [2.0] * 12
    assert [one["learning_rate"] for one in found] == [0.5] * 6 + [0.25] * 6
    assert [step for step, one in enumerate(found) if "gradient_norm" in one] == [0, 10]
    assert found[10]["gradient_norm"] == pytest.approx(norms[10])


@pytest.mark.parametrize("zero_copy", [False, True], ids=["private", "shared"])
def test_a_scheduler_on_the_attached_optimizer_trains_as_in_plain_torch(
    start: Callable[..., Services], zero_copy: bool
) -> None:
    plain = make_model()
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.05, weight_decay=0.01)
    plain_rates = loop(plain, plain_optimizer, iter(range(10)))

    services = start(ps=1 if zero_copy else 2, workers=1)
    model = make_model()
    session = services.connect()
    optimizer = session.attach(
        model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01), zero_copy=zero_copy
    )
    attached = [parameter.data_ptr() for parameter in model.parameters()]
    assert isinstance(optimizer, torch.optim.Optimizer)
    rates = loop(model, optimizer, session.steps(10))
    assert session.step == 10
    session.close()
    assert [parameter.data_ptr() for parameter in model.parameters()] == attached

    assert rates == plain_rates
    assert rates[0] == 0.05
    assert rates[-1] == 0.05 * 0.5**3
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    found = services.end()
    assert (found["steps"], found["checkpoint_step"]) == (10, 10)
    assert found["versions"] == [10] * (1 if zero_copy else 2)


def test_a_script_says_how_many_checkpoints_are_kept(start: Callable[..., Services], tmp_path: Path) -> None:
    services, model = start(ps=1, workers=1), make_model()
    session = services.connect(checkpoint_keep=1)
    loop(model, session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)), session.steps(4))
    session.close()
    services.end()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]


def test_workers_push_and_pull_named_tensors_in_step(start: Callable[..., Services]) -> None:
    services = start(ps=2, workers=2)
    given = [torch.arange(4.0) + 1, torch.full((4,), 3.0)]

    def worker(index: int) -> list[torch.Tensor]:
        with services.connect(index) as session:
            w, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(2, 3))
            session.attach({"w": w, "layer.b": b}, torch.optim.SGD([w, b], lr=0.5))
            assert (session.replica, session.num_replicas) == (index, 2)
            first = session.push_pull({"w": given[index]})
            assert list(first) == ["w"]
            session.push({"w": given[index], "layer.b": torch.full((2, 3), float(index))})
            held = session.pull(["w", "layer.b"])
            # Copies: what a person does with them stays theirs.
            held["w"].zero_()
            for bad, message in (
                ({"v": given[0]}, "the job has no tensor 'v'; it has w, layer.b"),
                ({"w": torch.zeros(5)}, r"shape \(5,\)"),
                ({"w": torch.zeros(4, dtype=torch.float64)}, "dtype torch.float64"),
            ):
                with pytest.raises(TensorError, match=message):
                    session.push(bad)
            with pytest.raises(TensorError, match="no tensor 'v'"):
                session.pull(["v"])
            return [first["w"], *session.pull().values()]

    mine, theirs = services.workers(lambda: worker(0), lambda: worker(1))
    mean = (given[0] + given[1]) / 2
    for got in (mine, theirs):
        assert torch.equal(got[0], -0.5 * mean)
        assert torch.equal(got[1], -0.5 * mean - 0.5 * mean)
        assert torch.equal(got[2], torch.ones(2, 3) - 0.5 * 0.5)
    assert services.end()["steps"] == 2


def test_what_does_not_fit_is_refused_and_the_others_go_on(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=2)
    session = services.connect(0)
    with pytest.raises(UsageError, match="not attached"):
        session.link  # noqa: B018

    def train(index: int, session: Session, width: int = 3) -> int:
        w = nn.Parameter(torch.zeros(width))
        optimizer = session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))
        with pytest.raises(UsageError, match="already attached"):
            session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))
        with pytest.raises(JobError, match="before it"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        for _ in session.steps(4):
            w.grad = torch.ones(width)
            optimizer.step()
        session.close()
        return session.step

    def joined() -> bool:
        with contextlib.suppress(UsageError):
            return bool(session.link.incarnation)
        return False

    def other() -> int:
        # The first worker's job is the cluster's.
        wait_for(joined, "the first worker to join")
        wrong = services.connect(1)
        with pytest.raises(
            MismatchError, match=r"the job of worker/1 differs from that.* \(5,\) here, \(3,\) in the job"
        ):
            train(1, wrong, width=5)
        wrong.shutdown()
        return train(1, services.connect(1))

    assert services.workers(lambda: train(0, session), other) == [4, 4]
    assert services.end()["steps"] == 4


def test_a_worker_whose_part_of_the_last_step_is_counted_ends_its_loop_when_the_other_fails(
    start: Callable[..., Services],
) -> None:
    services = start(ps=2, workers=2)

    def worker(index: int) -> int:
        session = services.connect(index)
        w = nn.Parameter(torch.zeros(300))
        optimizer = session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))
        try:
            for step in session.steps(50):
                w.grad = torch.full((300,), float("nan") if (step, index) == (5, 1) else 1.0)
                optimizer.step()
        except NonFiniteError as error:
            session.fail(error)
            return -1
        finally:
            session.shutdown()
        return session.step

    began_s = time.monotonic()
    first, second = services.workers(lambda: worker(0), lambda: worker(1))
    # Where its own part is counted in step 5, that step stays open for good.
    assert first in (5, 6)
    assert second == -1
    found = services.end(code=5)
    assert "step 5, replica 1: the gradient of 'w' has NaN" in found["reason"]
    assert (found["steps"], found["checkpoint_step"]) == (5, 5)
    # Nobody asks servers that have gone with the job for as long as a deadline allows.
    assert time.monotonic() - began_s < TIMEOUTS.rpc_s


def test_a_script_that_declares_overlap_trains_as_in_plain_torch(start: Callable[..., Services]) -> None:
    plain = make_model()
    loop(plain, torch.optim.Adam(plain.parameters(), lr=0.05), iter(range(8)))

    services = start(ps=2, workers=1)
    model = make_model()
    session = services.connect()
    optimizer = session.attach(model, torch.optim.Adam(model.parameters(), lr=0.05), overlap=True)
    early = []

    def noting() -> Iterator[int]:
        for step in session.steps(8):
            yield step
            early.append(step if session.trainer.step == step + 1 else -1)

    pushes = session.trainer.begin_early
    left: list[int] = []

    def begin(*args: Any) -> None:
        left.append(session.step)
        pushes(*args)

    session.trainer.begin_early = begin  # type: ignore[method-assign]
    loop(model, optimizer, noting())
    session.close()

    assert early == list(range(8))
    # A scheduler's rates travel with gradients that leave during backward().
    assert left == list(range(1, 8))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert services.end()["steps"] == 8


@pytest.mark.parametrize("what", ["clipping", "a rate", "data", "numpy"])
def test_what_changes_after_gradients_have_left_is_refused(start: Callable[..., Services], what: str) -> None:
    services = start(ps=1, workers=1)
    model = make_model()
    session = services.connect()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), overlap=True)
    points, labels = batch(0)

    def train() -> None:
        for step in session.steps(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points), labels).backward()  # type: ignore[no-untyped-call]
            if step == 2 and what == "clipping":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            gradient = next(model.parameters()).grad
            assert gradient is not None
            if step == 2 and what == "data":
                gradient.data.clamp_(max=float(gradient.max()) / 2)
            if step == 2 and what == "numpy":
                gradient.numpy()[:] *= 0.5
            if step == 2 and what == "a rate":
                optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()

    with pytest.raises(JobError, match="after the backward pass had sent") as found:
        train()
    assert session.step == 2
    session.fail(found.value)
    session.shutdown()
    assert services.end(code=2)["steps"] in (2, 3)


def overlapping(services: Services) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    model, session = make_model(), services.connect()
    return session, model, session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), overlap=True)


NOT_STEPPED = r"step 3: backward\(\) has sent gradients, but no step\(\) followed; .*overlap=False"


def test_a_batch_that_is_left_out_after_its_gradients_have_left_ends_the_job_with_what_to_do(
    start: Callable[..., Services],
) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = overlapping(services)

    def train() -> None:
        for step in session.steps(5):
            optimizer.zero_grad()
            backward(model, step)
            if step != 3:
                optimizer.step()

    with pytest.raises(JobError, match=NOT_STEPPED) as found:
        train()
    # Nothing of it is under way any more.
    assert not session.trainer.open.leaves_early and not session.trainer.open.running is not None
    session.fail(found.value)
    session.shutdown()
    # One of the two may have been applied by the single server before anybody could know.
    assert services.end(code=2)["steps"] in (3, 4)


@pytest.mark.parametrize("how", ["zero_grad", "close", "end of the script"])
def test_a_backward_pass_without_its_step_outside_of_a_loop_is_refused_too(
    start: Callable[..., Services], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = overlapping(services)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    optimizer.zero_grad()
    backward(model, 3)
    if how == "zero_grad":
        with pytest.raises(JobError, match=NOT_STEPPED) as found:
            optimizer.zero_grad()
        session.fail(found.value)
        session.shutdown()
    elif how == "end of the script":
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        connecting._EndOfScript(session).process_ends()
        assert codes == [2]
    else:
        with pytest.raises(JobError, match=NOT_STEPPED):
            session.close()
    assert "no step() followed" in services.end(code=2)["reason"]


@pytest.mark.parametrize("how", ["by hand", "loop", "broken loop"])
def test_a_backward_pass_that_belongs_to_no_step_trains_nothing(start: Callable[..., Services], how: str) -> None:
    services = start(ps=1, workers=1)
    session, model, optimizer = overlapping(services)
    for step in range(4) if how == "by hand" else session.steps(4 if how == "loop" else 9):
        if step == 4:
            break
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert session.step == 4
    # To look at the gradients, say: without the optimizer's zero_grad() no step begins.
    model.zero_grad()
    backward(model, 9)
    assert not session.trainer.open.running is not None
    session.close()
    found = services.end()
    assert (found["steps"], found["checkpoint_step"], found["versions"]) == (4, 4, [4])


def test_steps_outside_of_a_loop_overlap_from_zero_grad_on(start: Callable[..., Services]) -> None:
    plain = make_model()
    loop(plain, torch.optim.SGD(plain.parameters(), lr=0.05), iter(range(5)))
    services = start(ps=1, workers=1)
    session, model, optimizer = overlapping(services)
    pushes = session.trainer.begin_early
    left: list[int] = []

    def begin(*args: Any) -> None:
        left.append(session.step)
        pushes(*args)

    session.trainer.begin_early = begin  # type: ignore[method-assign]
    loop(model, optimizer, iter(range(5)))
    session.close()
    assert left == [1, 2, 3, 4]
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert services.end()["steps"] == 5


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("way", ["declared", "job"])
def test_overlap_and_zero_copy_exclude_each_other_whatever_way_they_come_in(way: str) -> None:
    nobody = '{"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:0"]}'
    session = shardline.connect(cluster=nobody, task="worker/0", timeout_s=2.0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    settings: dict[str, Any] = {"overlap": True} if way == "declared" else {"job": make_job("sgd").spec(model)}
    with pytest.raises(UsageError, match="overlap and zero_copy can't be combined"):
        session.attach(model, optimizer, zero_copy=True, **settings)
    session.shutdown()


class Uneven(nn.Module):
    """One layer that every pass uses, one that every other pass does, one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.sometimes, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        found: torch.Tensor = self.always(x)
        return found + self.sometimes(x) if self.passes % 2 == 0 else found


def uneven_loop(model: Uneven, optimizer: torch.optim.Optimizer, steps: Iterator[int], **how: bool) -> list[set[str]]:
    """Names of the gradients that there are after each step."""
    found = []
    for step in steps:
        optimizer.zero_grad(**how)
        backward(model, step)
        # Written to by hand, as clipping does: what has no gradient stays without.
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append({name for name, item in model.named_parameters() if item.grad is not None})
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_copy", [False, True], ids=["private", "shared"])
def test_a_parameter_that_took_no_part_in_a_step_is_left_alone_as_in_plain_torch(
    start: Callable[..., Services], zero_copy: bool, set_to_none: bool
) -> None:
    arguments: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    plain = Uneven()
    plain_optimizer = torch.optim.SGD(plain.parameters(), **arguments)
    there = uneven_loop(plain, plain_optimizer, iter(range(6)), set_to_none=set_to_none)

    services = start(ps=1, workers=1)
    model, session = Uneven(), services.connect()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), **arguments), zero_copy=zero_copy)
    assert uneven_loop(model, optimizer, session.steps(6), set_to_none=set_to_none) == there
    session.close()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(value, first[name]) == name.startswith("never")
    # Hooks go with the session.
    assert not any(value._post_accumulate_grad_hooks for value in model.parameters())
    assert services.end()["steps"] == 6


def test_a_gradient_written_by_hand_into_shared_memory_counts(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    model, session = Uneven(), services.connect()
    before = model.never.bias.detach().clone()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), zero_copy=True)
    for how in range(2):
        optimizer.zero_grad()
        assert model.never.bias.grad is not None
        if how == 0:
            model.never.bias.grad.fill_(1.0)
        else:
            model.never.bias.grad = torch.ones(3)
        optimizer.step()
    session.close()
    assert torch.equal(model.never.bias, before - 0.5 - 0.5)
    assert services.end()["steps"] == 2


def test_gradients_are_private_once_their_step_was_given_up(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    model, session = make_model(), services.connect()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05), zero_copy=True)
    plain = make_model()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    finish = session.trainer.finish
    lost: list[set[int]] = []

    def places() -> set[int]:
        return {item.grad.data_ptr() for item in model.parameters() if item.grad is not None}

    def lose_the_answer() -> Any:
        if session.step == 2 and not lost:
            lost.append(places())
            # The step was counted, but this worker is told to look for its step again.
            finish()
            stepper = session._loop.runner.stepper  # no other way: the answer is to be lost between two lines of it
            stepper.stale = True
            stepper.failed = lambda error, seen: Do.AGAIN  # type: ignore[method-assign]
            raise Restart("told to begin again")
        return finish()

    session.trainer.finish = lose_the_answer  # type: ignore[method-assign,assignment]
    for step in session.steps(5):
        if step < 2:
            optimizer.zero_grad()
        elif step == 3:
            assert not places() & lost[0]
            # Not the optimizer's: it zeroes whatever lies there.
            model.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        optimizer.step()
        plain_optimizer.zero_grad()
        backward(plain, step)
        plain_optimizer.step()
    session.close()
    assert lost
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert services.end()["steps"] == 5
