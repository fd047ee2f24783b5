"""The rules that change a gradient or a rate and leave the step to the optimizer; what all these rules refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardline.core.spec import TensorSpec
from shardline.errors import JobError, ProtocolError
from shardline.update import ALLOWED, RULES, check_rule, check_tensors, rule
from tests.support.served import MOMENTUM, RATE, ROUNDING, Served, anyhow, difference, noise, served, train

MOMENTUM_RULES = (
    "nag-asgd",
    "multi-asgd",
    "lwp",
    "smega2",
    "dana:kind=zero",
    "dana",
    "dana:kind=dc",
)
SGD_RULES = (*MOMENTUM_RULES, "dc-asgd", "dc-asgd:kind=c")
FINE = {"momentum": 0.9}
BEYOND = {"staleness-aware": ("ASGD", "Adafactor", "Rprop"), "gap-aware": ("Rprop",)}
"""Optimizers that the change of a gradient or of a rate would not reach."""
REACHED = [(method, name) for method, refused in BEYOND.items() for name in ALLOWED if name not in refused]


# Delay compensation


@pytest.mark.parametrize("method", ["dc-asgd:kind=a", "dc-asgd:kind=c"])
def test_a_gradient_at_the_servers_parameters_is_not_compensated(method: str) -> None:
    plain, compensated = Served("torch", lr=RATE), Served(method, lr=RATE)
    noises = noise(12)
    for _ in range(10):
        gradient = next(noises)
        for server in (plain, compensated):
            server.pull()
            server.push(gradient)
        assert torch.equal(plain.parameters, compensated.parameters)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["a", "c"])
def test_compensation_of_no_strength_is_none(kind: str, momentum: float) -> None:
    plain = served("torch", momentum=momentum, start=1.0)
    none = served(f"dc-asgd:kind={kind},strength=0.0", momentum=momentum, start=1.0)
    some = served(f"dc-asgd:kind={kind}", momentum=momentum, start=1.0)
    for server in (plain, none, some):
        train(server, anyhow(4, 40))
    assert torch.equal(plain.parameters, none.parameters)
    assert difference(plain.parameters, some.parameters) > 1e-6


def test_the_right_strength_compensates_a_quadratic_exactly() -> None:
    curvature, moved = 3.0, 0.2
    start = torch.tensor([0.4], dtype=torch.float64)
    late = curvature * start
    strength = curvature / float(late) ** 2
    server = Served(f"dc-asgd:kind=c,strength={strength!r}", shape=(1,), start=0.4, lr=1.0)
    server.pull(0)
    server.pull(1)
    server.push(torch.tensor([moved], dtype=torch.float64), 1)
    before = server.parameters
    server.push(late, 0)
    assert difference(before - server.parameters, curvature * before) < ROUNDING
    assert difference(late, curvature * before) > 0.5


def test_adaptive_compensation_is_its_equations() -> None:
    server = Served("dc-asgd:kind=a,strength=0.5,decay=0.8", start=1.0, lr=RATE)
    theta, mean, sent = np.ones(5), np.zeros(5), {worker: np.ones(5) for worker in range(3)}
    noises = noise(13)
    for worker in range(3):
        server.pull(worker)
    for worker in anyhow(3, 40):
        gradient = next(noises)
        server.push(gradient, worker)
        g = gradient.numpy()
        mean = 0.8 * mean + 0.2 * g * g
        theta = theta - RATE * (g + 0.5 / np.sqrt(mean + 1e-7) * g * g * (theta - sent[worker]))
        assert np.abs(server.parameters.numpy() - theta).max() < 1e-14
        if worker:
            sent[worker] = server.pull(worker).numpy()


def test_dana_compensates_from_the_point_ahead_that_was_sent() -> None:
    server = served("dana:kind=dc,strength=0.7", start=1.0)
    theta, v, sent = np.ones(5), np.zeros((3, 5)), np.ones((3, 5))
    noises = noise(14)
    for worker in range(3):
        server.pull(worker)
    for worker in anyhow(3, 40):
        gradient = next(noises)
        server.push(gradient, worker)
        g = gradient.numpy()
        g = g + 0.7 * g * g * (theta - sent[worker])
        v[worker] = MOMENTUM * v[worker] + g
        theta = theta - RATE * v[worker]
        sent[worker] = theta - RATE * MOMENTUM * v.sum(0)
        assert np.abs(server.pull(worker).numpy() - sent[worker]).max() < 1e-13


# Staleness


@pytest.mark.parametrize(("optimizer", "arguments"), [("SGD", {"momentum": 0.9, "weight_decay": 0.1}), ("AdamW", {})])
def test_a_late_push_has_its_rate_divided_by_its_staleness(optimizer: str, arguments: dict[str, float]) -> None:
    server = Served("staleness-aware", optimizer=optimizer, start=1.0, lr=RATE, **arguments)
    parameter = torch.nn.Parameter(server.parameters)
    torchs = getattr(torch.optim, optimizer)([parameter], lr=RATE, foreach=False, **arguments)
    noises = noise(15)
    for worker in anyhow(6, 80):
        gradient = next(noises)
        server.push(gradient, worker)
        # A fresh push and one that is late by 1 get the rate itself.
        torchs.param_groups[0]["lr"] = RATE / max(1, server.staleness[-1])
        parameter.grad = gradient.clone()
        torchs.step()
        assert torch.equal(server.parameters, parameter.detach())
        server.pull(worker)
    assert {0, 1, 2, 5} <= set(server.staleness)


@pytest.mark.parametrize(("staleness", "rate"), [(0, 0.5), (1, 0.5), (2, 0.25), (4, 0.125), (8, 0.0625)])
def test_rate_times_staleness_is_the_jobs_rate(staleness: int, rate: float) -> None:
    server = Served("staleness-aware", lr=0.5)
    nothing, one = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    server.pull(0)
    for _ in range(staleness):
        server.push(nothing, 1)
    server.push(one, 0)
    assert torch.equal(server.parameters, -rate * one)


# Gaps


def test_a_gradient_at_the_servers_parameters_is_left_alone_by_gap_aware() -> None:
    arguments = {"lr": RATE, "momentum": 0.9, "weight_decay": 0.1}
    plain, aware = Served("torch", start=1.0, **arguments), Served("gap-aware", start=1.0, **arguments)
    noises = noise(16)
    for turn in range(30):
        gradient = next(noises)
        for server in (plain, aware):
            server.pull(turn % 3)
            server.push(gradient, turn % 3)
        assert torch.equal(plain.parameters, aware.parameters)


def test_a_gap_of_one_average_step_halves_a_gradient_and_twice_the_gap_costs_twice_as_much() -> None:
    found = []
    for moves in (1, 2):
        server = Served("gap-aware", lr=RATE)
        one = torch.ones(5, dtype=torch.float64)
        # The average of all steps is one step, however many there were.
        for turn in range(4):
            if turn == 4 - moves:
                server.pull(0)
            server.push(one, 1)
        before = server.parameters
        server.push(one, 0)
        found.append(RATE / (before - server.parameters) - 1)
    assert difference(2 * found[0], found[1]) < 1e-12
    assert difference(found[0], torch.ones(5, dtype=torch.float64)) < 1e-6


@pytest.mark.parametrize("maximize", [False, True])
def test_gap_aware_is_its_equations(maximize: bool) -> None:
    """Weight decay is divided by the gap like the gradient, and the largest rate counts."""
    sign = -1.0 if maximize else 1.0
    server = served("gap-aware:decay=0.9", start=1.0, weight_decay=0.05, maximize=maximize)
    theta, v, mean, largest = np.ones(5), np.zeros(5), np.zeros(5), 0.0
    sent = {worker: np.ones(5) for worker in range(3)}
    noises = noise(17)
    for worker in range(3):
        server.pull(worker)
    for steps, worker in enumerate(anyhow(3, 60)):
        gradient, rate = next(noises), RATE * (1 if steps < 30 else 0.1)
        server.push(gradient, worker, lr=rate)
        largest = max(largest, rate)
        gap = np.zeros(5)
        if steps:
            gap = np.abs(theta - sent[worker]) / (largest * (np.sqrt(mean / (1 - 0.9**steps)) + 1e-8))
        v = MOMENTUM * v + (sign * gradient.numpy() + 0.05 * theta) / (1 + gap)
        theta = theta - rate * v
        mean = 0.9 * mean + 0.1 * v * v
        assert np.abs(server.parameters.numpy() - theta).max() < 1e-11
        sent[worker] = server.pull(worker).numpy()


def test_decoupled_weight_decay_is_not_divided_by_the_gap() -> None:
    server = Served("gap-aware", optimizer="AdamW", start=1.0, lr=RATE, weight_decay=0.5)
    for worker in range(2):
        server.pull(worker)
    server.push(torch.ones(5, dtype=torch.float64), 1)
    before = server.parameters
    server.push(torch.zeros(5, dtype=torch.float64), 0)
    steps = Served("gap-aware", optimizer="AdamW", start=1.0, lr=RATE, weight_decay=0.0)
    for worker in range(2):
        steps.pull(worker)
    steps.push(torch.ones(5, dtype=torch.float64), 1)
    undecayed = steps.parameters
    steps.push(torch.zeros(5, dtype=torch.float64), 0)
    adam_alone = undecayed - steps.parameters
    assert difference(before - server.parameters, RATE * 0.5 * before + adam_alone) < ROUNDING


# Refusals


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gap-aware:decay=1.0", "decay of gap-aware is 1.0; it must be at least 0 and below 1"),
        ("gap-aware:decay=-0.1", "decay of gap-aware is -0.1"),
        ("dc-asgd:kind=b", "kind of dc-asgd is 'b'; give c (constant strength) or a (adaptive)"),
        ("dc-asgd:strength=-0.5", "strength of dc-asgd is -0.5; give 0 or more, or -1 for the kind's usual one"),
        ("dc-asgd:decay=1.0", "decay of dc-asgd is 1.0; it must be at least 0 and below 1"),
        ("dc-asgd:kind=c,decay=0.5", "dc-asgd with kind=c keeps no mean, so decay=0.5 has no meaning"),
        ("lwp:lag=-1", "lag of lwp is -1; give the steps to look ahead, or 0 for automatic"),
        ("dana:kind=fast", "kind of dana is 'fast'; give zero, slim or dc"),
        ("dana:kind=dc,strength=-1.0", "strength of dana is -1.0; it must be at least 0"),
        ("dana:strength=1.0", "dana with kind=slim compensates nothing, so strength=1.0 has no meaning"),
        ("dana:kind=zero,strength=1.0", "dana with kind=zero compensates nothing"),
    ],
)
def test_a_setting_that_has_no_meaning(text: str, sentence: str) -> None:
    with pytest.raises(JobError) as refused:
        RULES.parse(text)
    assert sentence in str(refused.value)


def refused(method: str, optimizer: str, *groups: dict[str, Any]) -> str:
    with pytest.raises(JobError) as found:
        check_rule(rule(optimizer, groups or ({},), method=method))
    return str(found.value)


@pytest.mark.parametrize("method", SGD_RULES)
@pytest.mark.parametrize("optimizer", sorted(ALLOWED.keys() - {"SGD"}))
def test_another_optimizer_than_sgd(method: str, optimizer: str) -> None:
    assert (
        refused(method, optimizer) == f"update rule {RULES.canonical(method)} runs with SGD only, and the job's "
        f"optimizer is {optimizer}; use SGD or another rule"
    )


@pytest.mark.parametrize("method", MOMENTUM_RULES)
def test_sgd_without_momentum(method: str) -> None:
    assert (
        refused(method, "SGD", FINE, {"momentum": 0.0}) == f"update rule {RULES.canonical(method)} needs momentum, and "
        "SGD's is 0 in parameter group 1; set it, for example to 0.9, or choose another rule"
    )
    check_rule(rule("SGD", (FINE, FINE), method=method))


@pytest.mark.parametrize("method", MOMENTUM_RULES)
@pytest.mark.parametrize(
    ("name", "value"),
    [("dampening", 0.5), ("nesterov", True), ("maximize", True), ("foreach", True), ("fused", True)],
)
def test_arguments_of_sgd_that_a_momentum_of_its_own_has_no_use_for(method: str, name: str, value: Any) -> None:
    assert (
        refused(method, "SGD", {**FINE, name: value}) == f"update rule {RULES.canonical(method)} can't run with "
        f"{name}={value}, which SGD has in parameter group 0; leave it out, or choose another rule"
    )


@pytest.mark.parametrize("method", ["dc-asgd", "dc-asgd:kind=c"])
def test_compensation_takes_sgd_with_and_without_momentum_but_no_ascent(method: str) -> None:
    assert "can't run with maximize=True" in refused(method, "SGD", {"maximize": True})
    for arguments in ({}, FINE, {**FINE, "nesterov": True}, {**FINE, "dampening": 0.1}):
        check_rule(rule("SGD", [arguments], method=method))


@pytest.mark.parametrize(
    ("method", "optimizer", "why"),
    [
        ("staleness-aware", "ASGD", "its rate of a step was set by the step before"),
        ("staleness-aware", "Adafactor", "it takes the smaller of the rate and one of its own"),
        ("staleness-aware", "Rprop", "its steps are its own, and the rate is only the first of them"),
        ("gap-aware", "Rprop", "update rule gap-aware divides gradients, but Rprop takes only their signs"),
    ],
)
def test_an_optimizer_that_the_change_would_not_reach(method: str, optimizer: str, why: str) -> None:
    assert why in refused(method, optimizer)


@pytest.mark.parametrize(("method", "optimizer"), REACHED)
def test_every_other_optimizer_makes_another_step_of_a_late_push(method: str, optimizer: str) -> None:
    steps = {}
    for chosen in ("torch", method):
        server = Served(chosen, optimizer=optimizer, shape=(3, 4), start=1.0, lr=0.01)
        noises = noise(18, 12)
        for worker in (0, 1):
            server.pull(worker)
        for worker in (1, 1, 1, 0):
            before = server.parameters
            server.push(next(noises), worker)
            server.pull(1)
        assert server.staleness == [0, 0, 0, 3]
        steps[chosen] = server.parameters - before
    if method == "staleness-aware":
        torch.testing.assert_close(3 * steps[method], steps["torch"], rtol=1e-9, atol=1e-15)
    else:
        assert difference(steps[method], steps["torch"]) > 1e-4 * float(steps["torch"].abs().max())


@pytest.mark.parametrize("method", ["gap-aware", "dc-asgd"])
def test_complex_parameters_have_no_gap_and_no_curvature(method: str) -> None:
    tensor = TensorSpec(name="w", shape=(3,), dtype="complex64")
    with pytest.raises(JobError, match=f"'w' has dtype complex64; {method} updates real tensors only"):
        check_tensors(rule("SGD", [{}], method=method), [tensor])
    check_tensors(rule("SGD", [{}], method="staleness-aware"), [tensor])


@pytest.mark.parametrize("method", MOMENTUM_RULES)
def test_a_push_without_momentum_or_with_dampening_changes_nothing(method: str) -> None:
    server = Served(method, lr=0.1, momentum=0.9)
    server.push(torch.ones(5))
    before, state = server.parameters, server.rule.export()
    for hyper in ({"momentum": 0.0}, {"dampening": 0.5}):
        with pytest.raises(ProtocolError, match="keep the momentum above 0 and the dampening at 0"):
            server.push(torch.ones(5), **hyper)
        with pytest.raises(ProtocolError, match="keep the momentum above 0"):
            server.rule.check_hyper(hyper)
    assert torch.equal(server.parameters, before)
    assert server.rule.export().scalars == state.scalars
    server.push(torch.ones(5), momentum=0.5, lr=0.01, weight_decay=0.1)
    assert not torch.equal(server.parameters, before)
