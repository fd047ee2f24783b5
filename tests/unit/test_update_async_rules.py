"""The rules for asynchronous workers do what their papers say, on a server's own bucket and shard."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

import shardline
from shardline.consistency.server import NumberedPush
from shardline.core.gradients import Gradient
from shardline.core.outcome import Outcome
from shardline.core.spec import ConsistencySpec, TensorSpec
from shardline.update import RULES, rule
from shardline_ps.shard.shard import Shard
from tests.support.builders import make_shard
from tests.support.served import MOMENTUM, RATE, ROUNDING, Served, anyhow, bowl, difference, noise, served, train


def test_rules_have_names_and_classes() -> None:
    assert RULES.parse("dana:kind=zero") == shardline.DANA(kind="zero")
    assert RULES.parse("dana") == shardline.DANA() == shardline.DANA(kind="slim")
    assert RULES.parse("dc-asgd:kind=c") == shardline.DCASGD(kind="c")
    assert RULES.parse("lwp:lag=3") == shardline.LWP(lag=3)
    plain = (shardline.StalenessAware, shardline.GapAware, shardline.NAGASGD, shardline.MultiASGD, shardline.SMEGA2)
    assert [str(kind()) for kind in plain] == ["staleness-aware", "gap-aware", "nag-asgd", "multi-asgd", "smega2"]


# The server


def shard_of(method: str, workers: int, **arguments: float | bool) -> Shard:
    return make_shard(
        (TensorSpec(name="w", shape=(70,), dtype="float32"), TensorSpec(name="v", shape=(3,), dtype="float32")),
        value=1.0,
        rule=rule("SGD", [{"lr": RATE, **arguments}], method=method),
        consistency=ConsistencySpec(mode="async"),
        replicas=workers,
    )


def push_to(shard: Shard, worker: int, gradients: dict[int, Tensor], base_version: int) -> int:
    """Returns the staleness."""
    task = f"worker/{worker}"
    push = NumberedPush(task=task, incarnation=1, seq=shard.mode.last_push(task, 1) + 1, base_version=base_version)
    given = {
        number: Gradient(flat, (True,) * len(shard.buckets[number].spec.slices)) for number, flat in gradients.items()
    }
    decision, staleness = shard.push(push, given)
    assert decision.outcome is Outcome.APPLIED
    return staleness


def test_the_mean_staleness_is_the_number_of_other_workers() -> None:
    workers = 8
    chance = random.Random(0)
    # Speeds differ by a factor of ten; at the end everybody pushes once more.
    order = [*chance.choices(range(workers), weights=range(2, 2 + 3 * workers, 3), k=392), *range(workers)]
    shard = shard_of("torch", workers)
    pulled = dict.fromkeys(range(workers), 0)
    found = []
    for worker in order:
        gradients = {bucket.number: torch.zeros_like(bucket.values) for bucket in shard.buckets}
        found.append(push_to(shard, worker, gradients, pulled[worker]))
        pulled[worker] = shard.version
    # Each worker's pushes are late by the others' pushes up to its last one, and the last ones are 7 to 0 short.
    assert sum(found) == len(order) * (workers - 1) - workers * (workers - 1) // 2
    assert abs(sum(found) / len(found) - (workers - 1)) < 0.08


@pytest.mark.parametrize(
    ("method", "nesterov"),
    [
        ("torch", False),
        ("torch", True),
        ("staleness-aware", True),
        ("gap-aware", True),
        ("dc-asgd", True),
        ("dc-asgd:kind=c", False),
    ],
)
def test_one_worker_has_the_bits_of_serial_sgd(method: str, nesterov: bool) -> None:
    shard = shard_of(method, 1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    serial(shard, nesterov=nesterov, weight_decay=0.01)


@pytest.mark.parametrize(("method", "nesterov"), [("multi-asgd", False), ("lwp", False), ("dana:kind=slim", True)])
def test_one_worker_has_the_bits_of_serial_momentum(method: str, nesterov: bool) -> None:
    serial(shard_of(method, 1, momentum=0.9, weight_decay=0.01), nesterov=nesterov, weight_decay=0.01)


def serial(shard: Shard, *, nesterov: bool, weight_decay: float) -> None:
    """Train a shard and torch with the same gradients, and compare the bits after each step."""
    values = {bucket.number: torch.nn.Parameter(bucket.values.clone()) for bucket in shard.buckets}
    optimizer = torch.optim.SGD(
        values.values(), lr=RATE, momentum=0.9, nesterov=nesterov, weight_decay=weight_decay, foreach=False
    )
    noises = noise(3, 70 + 3 + 200)
    for _ in range(20):
        random_part = next(noises)
        gradients = {}
        for bucket in shard.buckets:
            pulled = bucket.answer(bucket.step, "worker/0")
            gradients[bucket.number] = bowl(pulled) + random_part[: len(pulled)].float()
            values[bucket.number].grad = gradients[bucket.number].clone()
        assert push_to(shard, 0, gradients, shard.version) == 0
        optimizer.step()
        for bucket in shard.buckets:
            for piece in bucket.spec.slices:
                part = slice(piece.offset, piece.end)
                assert torch.equal(bucket.values[part], values[bucket.number].detach()[part])


@pytest.mark.parametrize("delay", [0, 1, 3, 7, 15])
def test_a_constant_delay_is_stable_up_to_its_limit(delay: int) -> None:
    limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert limit == pytest.approx({0: 2, 1: 1, 3: 0.44504, 7: 0.20906, 15: 0.1013}[delay], rel=1e-3)
    sizes = {}
    for share in (0.98, 1.02):
        # As many workers in turn as it takes: each is late by all the others.
        server = Served("torch", shape=(1,), start=1.0, lr=share * limit)
        workers = delay + 1
        for worker in range(workers):
            server.pull(worker)
        reached = []
        for turn in range(40 * (2 * delay + 1)):
            worker = turn % workers
            server.push(server.pulled[worker], worker)
            reached.append(abs(float(server.pull(worker))))
        assert set(server.staleness[delay:]) == {delay}
        half = len(reached) // 2
        sizes[share] = max(reached[half:]) / max(reached[:half])
    assert sizes[0.98] < 0.9 < 1.1 < sizes[1.02]


# Momentum


def test_dana_slim_is_dana_zero() -> None:
    zero, slim = served("dana:kind=zero", start=1.0), served("dana:kind=slim", start=1.0)
    order = anyhow(6, 200)
    noises = noise(1)
    for server in (zero, slim):
        for worker in range(6):
            server.pull(worker)
    found = 0.0
    for worker in order:
        random_part = next(noises)
        for server in (zero, slim):
            server.push(bowl(server.pulled[worker]) + random_part, worker)
            server.pull(worker)
        found = max(found, difference(zero.pulled[worker], slim.pulled[worker]))
    assert 0 < found < ROUNDING
    # What the servers hold differs by what the look-ahead adds.
    assert difference(zero.parameters, slim.parameters) > 1e-3


def test_a_pull_under_dana_slim_gets_the_parameters_themselves() -> None:
    slim = served("dana:kind=slim")
    train(slim, anyhow(3, 12))
    assert slim.bucket.answer(slim.bucket.step, "worker/0").data_ptr() == slim.bucket.values.data_ptr()


@pytest.mark.parametrize(
    "method", ["nag-asgd", "dana:kind=zero", "dana:kind=slim", "dana:kind=dc,strength=0.0", "smega2"]
)
def test_what_one_worker_pulls_is_nesterovs_trajectory(method: str) -> None:
    server = served(method, start=1.0)
    parameter = torch.nn.Parameter(server.parameters)
    optimizer = torch.optim.SGD([parameter], lr=RATE, momentum=MOMENTUM, nesterov=True)
    noises = noise(2)
    for _ in range(100):
        pulled = server.pull()
        assert difference(pulled, parameter.detach()) < ROUNDING
        gradient = bowl(pulled) + next(noises)
        parameter.grad = gradient
        optimizer.step()
        server.push(gradient)


def test_momentum_of_all_workers_takes_dana_exactly_where_its_pulls_look() -> None:
    """In turn, only the others' gradients lie between what a worker was sent and where its own gradient belongs."""
    server, workers = served("dana:kind=zero", start=1.0), 5
    train(server, [turn % workers for turn in range(30)])
    noises = noise(4)
    sent = server.pull(0)
    between = torch.zeros(5, dtype=torch.float64)
    for worker in range(1, workers):
        gradient = bowl(server.pulled[worker]) + next(noises)
        server.push(gradient, worker)
        between += gradient
    reached = server.parameters - RATE * MOMENTUM * server.state("momentum_buffer", 0)
    assert difference(reached - sent, -RATE * between) < ROUNDING
    assert between.abs().max() > 0.1


@pytest.mark.parametrize("method", ["dana:kind=zero", "dana:kind=dc,strength=0.01"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_danas_sum_stays_the_sum_of_the_momenta(method: str, dtype: str) -> None:
    server = served(method, dtype=dtype)
    noises = noise(5)
    for turn, worker in enumerate(anyhow(7, 240)):
        server.pull(worker)
        server.push(next(noises).to(server.parameters.dtype), worker)
        if turn % 40 == 39:
            server.members(*({*range(7)} - {turn % 7}))
        if turn % 20 == 19:
            total = sum((server.state("momentum_buffer", w).double() for w in range(7)), torch.zeros(5).double())
            assert difference(server.state("momentum_sum"), total) < ROUNDING * 10
            assert total.abs().max() > 0.1


def test_gaps_are_ordered_as_the_look_aheads_promise() -> None:
    """Eight workers, nearly in turn, on a quadratic: how far the parameters move while a gradient is under way.

    DANA's gap is that of SGD without momentum; one momentum for all is the worst.
    """
    rate = 0.005
    gaps = {
        method: mean_gap(method, rate, momentum=MOMENTUM if method != "torch" else 0.0)
        for method in ("torch", "dana:kind=zero", "multi-asgd", "lwp", "nag-asgd")
    }
    plain, dana, multi, lwp, nag = gaps.values()
    assert dana < 1.5 * plain < multi < lwp < nag
    assert multi > 2 * dana


def mean_gap(method: str, rate: float, *, momentum: float) -> float:
    workers, pushes = 8, 240
    chance, noises = random.Random(2), noise(1)
    curvature = torch.linspace(0.4, 2.0, 5, dtype=torch.float64)
    server = Served(method, lr=rate, momentum=momentum)
    for worker in range(workers):
        server.pull(worker)
    ready = [chance.gammavariate(100, 0.01) for _ in range(workers)]
    gaps = []
    for _ in range(pushes):
        worker = min(range(workers), key=ready.__getitem__)
        ready[worker] += chance.gammavariate(100, 0.01)
        own = server.state("momentum_buffer", worker if method in ("multi-asgd", "dana:kind=zero") else None)
        used = server.parameters - rate * momentum * own
        gaps.append(float((used - server.pulled[worker]).square().mean().sqrt()))
        server.push(curvature * server.pulled[worker] + 0.1 * next(noises), worker)
        server.pull(worker)
    return sum(gaps[pushes // 4 :]) / len(gaps[pushes // 4 :])


def test_lwp_looks_ahead_by_the_number_of_other_workers_or_by_its_setting() -> None:
    automatic, fixed = served("lwp"), served("lwp:lag=2")
    for server in (automatic, fixed):
        train(server, anyhow(5, 20))
    direction = RATE * automatic.state("momentum_buffer")
    assert difference(automatic.pull(), automatic.parameters - 4 * direction) < ROUNDING
    automatic.members(0, 1)
    assert difference(automatic.pull(), automatic.parameters - 1 * direction) < ROUNDING
    assert difference(fixed.pull(), fixed.parameters - 2 * RATE * fixed.state("momentum_buffer")) < ROUNDING


def test_smega2_is_its_equations() -> None:
    """While workers join and leave."""
    server, decay = served("smega2", start=1.0, weight_decay=0.01), 0.01
    theta, v, total, pushes = np.ones(5), np.zeros(5), np.zeros(5), 0
    pushed: set[int] = set()
    noises = noise(6)
    for turn, worker in enumerate([*anyhow(3, 20), *anyhow(6, 40), *anyhow(2, 20)]):
        gradient = bowl(server.pull(worker)) + next(noises)
        server.push(gradient, worker)
        pushed.add(worker)
        g = gradient.numpy() + decay * theta
        theta = theta - RATE * (g + MOMENTUM * v)
        total, pushes = total + g, pushes + 1
        if pushes >= len(pushed):
            v, total, pushes = MOMENTUM * v + total / pushes, np.zeros(5), 0
        if turn == 59:
            server.members(0, 1)
            pushed &= {0, 1}
        workers, c = len(pushed), min(pushes, len(pushed))
        ahead = theta - RATE * MOMENTUM * (c / workers * total + (workers + c * (MOMENTUM - 1)) * v)
        assert np.abs(server.parameters.numpy() - theta).max() < 1e-13
        assert np.abs(server.pull(worker).numpy() - ahead).max() < 1e-13
    assert np.abs(v).max() > 0.1


@pytest.mark.parametrize("method", ["nag-asgd", "multi-asgd", "lwp", "dana:kind=zero", "dana:kind=slim", "smega2"])
def test_weight_decay_is_taken_at_the_servers_parameters(method: str) -> None:
    decayed, plain = served(method, start=1.0, weight_decay=0.1), served(method, start=1.0)
    noises = noise(7)
    for worker in anyhow(3, 30):
        gradient = next(noises)
        decayed_gradient = gradient + 0.1 * plain.parameters
        decayed.push(gradient, worker)
        plain.push(decayed_gradient, worker)
        assert difference(decayed.parameters, plain.parameters) < ROUNDING
        assert difference(decayed.pull(worker), plain.pull(worker)) < ROUNDING


# Changes of the learning rate


@pytest.mark.parametrize("method", ["nag-asgd", "dana:kind=zero", "dana:kind=dc", "lwp:lag=1", "smega2"])
def test_pulls_look_ahead_at_the_rate_of_the_last_push(method: str) -> None:
    server = served(method, start=1.0)
    train(server, anyhow(3, 12))
    before = server.parameters - server.pull(0)
    gradient = torch.zeros(5, dtype=torch.float64)
    same, slower = served(method), served(method)
    for other in (same, slower):
        image = server.bucket.image()
        other.bucket.restore(image, other.bucket.rule_of(image))
    same.push(gradient, 0)
    slower.push(gradient, 0, lr=RATE / 10)
    ahead, less = same.parameters - same.pull(0), slower.parameters - slower.pull(0)
    assert before.abs().max() > 1e-3
    # Up to delay compensation, which is none for a gradient of zero.
    assert difference(ahead, 10 * less) < 10 * ROUNDING


def test_dana_slim_and_zero_part_by_what_a_change_of_the_rate_is_worth() -> None:
    zero, slim = served("dana:kind=zero"), served("dana:kind=slim")
    noises, new = noise(8), RATE / 10
    for worker in anyhow(4, 40):
        gradient = next(noises)
        for server in (zero, slim):
            server.push(gradient, worker)
    assert difference(zero.pull(0), slim.pull(0)) < ROUNDING
    parted = (RATE - new) * MOMENTUM * zero.state("momentum_sum")
    assert parted.abs().max() > 0.01
    for worker in anyhow(4, 40, seed=1):
        gradient = next(noises)
        for server in (zero, slim):
            server.push(gradient, worker, lr=new)
        assert difference(zero.pull(0) - slim.pull(0), parted) < 5 * ROUNDING


def test_dana_slim_follows_nesterov_through_changes_of_the_rate_to_the_bit() -> None:
    slim = served("dana:kind=slim", start=1.0)
    parameter = torch.nn.Parameter(slim.parameters)
    optimizer = torch.optim.SGD([parameter], lr=RATE, momentum=MOMENTUM, nesterov=True, foreach=False)
    noises = noise(9)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = rate = RATE * (1 + step % 7) / 7
        gradient = bowl(slim.pull()) + next(noises)
        parameter.grad = gradient.clone()
        optimizer.step()
        slim.push(gradient, lr=rate)
        assert torch.equal(slim.parameters, parameter.detach())


# Workers that leave and join


def test_dana_zero_forgets_the_momentum_of_a_worker_that_leaves() -> None:
    server = served("dana:kind=zero", start=1.0)
    train(server, anyhow(3, 30))
    before, gone = server.parameters, server.state("momentum_buffer", 2)
    ahead = server.pull(0)
    server.members(0, 1)
    assert torch.equal(server.parameters, before)
    assert gone.abs().max() > 0.1
    assert difference(server.pull(0), ahead + RATE * MOMENTUM * gone) < ROUNDING
    # It joins again with none.
    gradient = torch.ones(5, dtype=torch.float64)
    server.push(gradient, 2)
    assert torch.equal(server.state("momentum_buffer", 2), gradient)


def test_dana_slim_keeps_the_step_that_a_worker_that_leaves_was_about_to_make() -> None:
    zero, slim = served("dana:kind=zero"), served("dana:kind=slim")
    noises = noise(10)

    def push(order: list[int]) -> None:
        for worker in order:
            gradient = next(noises)
            for server in (zero, slim):
                server.push(gradient, worker)

    push(anyhow(3, 30))
    parted = RATE * MOMENTUM * slim.state("momentum_buffer", 2)
    before = slim.parameters
    for server in (zero, slim):
        server.members(0, 1)
    assert torch.equal(slim.parameters, before)
    assert parted.abs().max() > 0.01
    assert difference(zero.pull(0) - slim.pull(0), parted) < ROUNDING
    # Once and for all: it neither grows nor comes again.
    push(anyhow(2, 50))
    assert difference(zero.pull(0) - slim.pull(0), parted) < 5 * ROUNDING


@pytest.mark.parametrize("method", ["multi-asgd", "lwp", "dana:kind=zero", "dana:kind=slim"])
def test_a_standby_that_hears_later_of_a_worker_that_left_holds_the_same_parameters(method: str) -> None:
    primary, standby = served(method, start=1.0), served(method, start=1.0)
    noises = noise(11)
    for turn, worker in enumerate([*anyhow(3, 20), *anyhow(2, 20)]):
        if turn == 20:
            primary.members(0, 1)
        gradient = next(noises)
        for server in (primary, standby):
            server.push(gradient, worker)
        assert torch.equal(primary.parameters, standby.parameters)
    standby.members(0, 1)
    assert standby.rule.workers == primary.rule.workers == {"worker/0", "worker/1"}
    assert difference(standby.pull(0), primary.pull(0)) < ROUNDING
