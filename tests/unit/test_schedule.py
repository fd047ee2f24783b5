from __future__ import annotations

import math

import pytest
import torch

from shardline import schedule
from shardline.core.spec import ScheduleSpec
from shardline.errors import JobError


def torch_factors(make, steps: int) -> list[float]:
    """Learning rates of a torch scheduler on an optimizer with lr 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def ours(spec: ScheduleSpec, steps: int) -> list[float]:
    return [schedule.factor(spec, step) for step in range(steps)]


def test_constant_is_one_at_every_step():
    assert ours(schedule.constant(), 5) == [1.0] * 5


def test_warm_up_rises_in_equal_steps_to_exactly_one():
    assert ours(schedule.constant(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "spec",
    [
        schedule.step(2, 0.5, warmup_steps=3),
        schedule.linear(13, 0.1, warmup_steps=3),
        schedule.cosine(13, 0.1, warmup_steps=3),
    ],
    ids=lambda spec: spec.kind,
)
def test_warm_up_is_followed_by_the_schedule_from_its_start(spec):
    assert ours(spec, 3) == [1 / 3, 2 / 3, 1.0]
    assert schedule.factor(spec, 3) == 1.0
    assert schedule.factor(spec, 5) < 1.0


def test_step_is_torchs_step_lr():
    theirs = torch_factors(lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3, gamma=0.5), 12)
    assert ours(schedule.step(3, 0.5), 12) == theirs


def test_linear_is_torchs_linear_lr_and_stays_at_the_end():
    theirs = torch_factors(
        lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=10), 14
    )
    assert ours(schedule.linear(10, 0.2), 14) == pytest.approx(theirs, rel=1e-12)
    assert schedule.factor(schedule.linear(10, 0.2), 1000) == pytest.approx(0.2)


def test_cosine_is_torchs_cosine_annealing_until_the_end_and_then_stays():
    theirs = torch_factors(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10, eta_min=0.1), 11)
    assert ours(schedule.cosine(10, 0.1), 11) == pytest.approx(theirs, rel=1e-12)
    assert schedule.factor(schedule.cosine(10, 0.1), 25) == pytest.approx(0.1)


def test_many_steps_of_decay_end_in_zero_and_not_in_an_error():
    assert schedule.factor(schedule.step(1, 0.5), 10**9) == 0.0


@pytest.mark.parametrize("kind", [schedule.linear, schedule.cosine])
def test_total_steps_come_from_the_job_where_they_are_not_given(kind):
    assert schedule.complete(kind(warmup_steps=2), 40) == kind(40, warmup_steps=2)
    assert schedule.complete(kind(30), 40).total_steps == 30
    with pytest.raises(JobError, match="its number of steps is not known"):
        schedule.complete(kind(), 0)
    with pytest.raises(JobError, match="complete"):
        schedule.factor(kind(), 3)


def test_schedules_without_an_end_are_complete_in_a_job_without_one():
    assert schedule.complete(schedule.step(5, 0.9), 0) == schedule.step(5, 0.9)
    assert schedule.complete(schedule.constant(3), 0) == schedule.constant(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedule.constant(-1), "warmup_steps is -1"),
        (lambda: schedule.constant(True), "warmup_steps is True"),
        (lambda: schedule.step(0, 0.5), "step_size is 0"),
        (lambda: schedule.step(2.5, 0.5), "step_size is 2.5"),
        (lambda: schedule.step(2, 0.0), "gamma is 0.0"),
        (lambda: schedule.step(2, 1.5), "gamma is 1.5"),
        (lambda: schedule.step(2, math.nan), "gamma is nan"),
        (lambda: schedule.step(2, 10**400), "gamma is 1000"),
        (lambda: schedule.linear(10, -0.5), "final_factor is -0.5"),
        (lambda: schedule.linear(10, "0"), "final_factor is '0'"),
        (lambda: schedule.cosine(10, warmup_steps=10), "use up all 10"),
        (lambda: schedule.complete(schedule.cosine(warmup_steps=10), 5), "use up all 5"),
        (lambda: schedule.check(ScheduleSpec(kind="exponential")), "'exponential'; it must be one of constant"),
    ],
)
def test_values_out_of_range_are_refused_with_the_value(make, words):
    with pytest.raises(JobError, match=words):
        make()
