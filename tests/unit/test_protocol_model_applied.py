"""Where workers run the optimizer, every cut and every worker has the bits of servers that run it, whoever dies."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from shardline.cadence import Told
from shardline.client.applied.worker_optimizer import WorkerOptimizer
from shardline.update import rule
from shardline_ps.shard.summing import SummingBucket
from tests.protocol_model.applied import AppliedCounts, AppliedModel, AppliedSetup
from tests.protocol_model.numbers import Broken

RULES = {
    "momentum": rule("SGD", ({"lr": 0.1, "momentum": 0.9},)),
    "adam": rule("Adam", ({"lr": 0.05},)),
    "adagrad": rule("Adagrad", ({"lr": 0.05},)),
}


def played(seeds: range, **changes: Any) -> AppliedCounts:
    total = AppliedCounts()
    for seed in seeds:
        setup = AppliedSetup(seed=seed, **{"rule": RULES["momentum"], **changes})
        counts = AppliedModel(setup).play()
        for name, number in asdict(counts).items():
            setattr(total, name, getattr(total, name) + number)
    return total


@pytest.mark.parametrize("name", RULES)
def test_no_schedule_of_deaths_changes_a_bit(name: str) -> None:
    counts = played(range(10), rule=RULES[name])
    # Otherwise the schedules would show nothing.
    assert counts.kills > 10 and counts.takeovers > 5 and counts.rollbacks > 10 and counts.taken > 20
    assert counts.died_bringing > 0 and counts.applied > 100 and counts.duplicates > 10


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1500, 100))
def test_no_schedule_of_hundreds_changes_a_bit(first: int) -> None:
    played(range(first, first + 100), steps=20, kills=12, losses=4)


def test_without_going_back_a_new_worker_would_never_have_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.protocol_model.applied.LIMIT", 3000)
    with pytest.raises(AssertionError, match="stuck"):
        played(range(10), goes_back=False)


def test_parameters_of_a_restored_server_taken_for_a_gradient_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived = WorkerOptimizer.arrived

    def trusting(self: WorkerOptimizer, step: int, told: Told) -> None:
        arrived(self, step, Told(located=told.located and self.step is None, wants_state=told.wants_state))

    monkeypatch.setattr(WorkerOptimizer, "arrived", trusting)
    monkeypatch.setattr("tests.protocol_model.applied.LIMIT", 3000)
    with pytest.raises((AssertionError, Broken)):
        played(range(30))


def test_a_cut_of_what_the_server_publishes_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SummingBucket, "has_state", property(lambda self: True))
    with pytest.raises(Broken):
        played(range(5))
