"""Standbys under random deaths of primaries, standbys and workers, without a network; and under rules that are wrong.

Seeds are fixed, so a failure names a schedule that can be played again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.protocol_model.asynchronous import AsyncCounts
from tests.protocol_model.numbers import Broken
from tests.protocol_model.standbys import StandbyModel, StandbySetup
from tests.protocol_model.standbys_async import AsyncStandbyModel, AsyncStandbySetup
from tests.protocol_model.tasks import Counts
from tests.support.covering import number_of_schedules

SHAPES = [(1,), (3,), (1, 1), (2, 3), (2, 1, 2), (1, 1, 1, 1)]


def setup(seed: int, **fixed: Any) -> StandbySetup:
    draw = random.Random(-1 - seed)
    replicas = draw.randint(1, 4)
    drawn: dict[str, Any] = {
        "shards": draw.choice(SHAPES),
        "replicas": replicas,
        "workers": draw.randint(1, replicas),
        "kills": draw.randint(0, 8),
        "steps": 6,
        "ps_kills": 4,
        "standby_kills": 2,
    }
    return StandbySetup(seed=seed, **{**drawn, **fixed})


def play(schedules: int, **options: Any) -> Counts:
    total = Counts()
    for seed in range(schedules):
        try:
            total.add(StandbyModel(setup(seed, **options)).run())
        except Broken as broken:
            broken.add_note(f"play it again: StandbyModel({setup(seed, **options)}).run()")
            raise
    return total


def any_broken(schedules: int, **options: Any) -> bool:
    def fails(seed: int) -> bool:
        try:
            StandbyModel(setup(seed, **options)).run()
        except Broken:
            return True
        return False

    return any(map(fails, range(schedules)))


@number_of_schedules(15, 150)
@pytest.mark.parametrize("voted", [False, True], ids=["eager", "voted"])
def test_one_ps_after_another_dies_without_a_rollback_and_the_bits_stay_equal(voted: bool, schedules: int) -> None:
    counts = play(schedules, voted=voted)
    assert counts.rollbacks == counts.overtaken == 0
    # The promises mean little unless the schedules were as rough as they claim to be.
    assert counts.promotions > schedules * (2 if voted else 4 / 3)
    assert counts.kills > schedules * 4 / 3
    assert counts.records > schedules * 10 / 3


@number_of_schedules(20, 50)
@pytest.mark.parametrize("voted", [False, True], ids=["eager", "voted"])
def test_servers_that_die_before_their_shards_are_protected_again_cost_a_rollback_and_no_bits(
    voted: bool, schedules: int
) -> None:
    counts = play(schedules, voted=voted, one_at_a_time=False)
    assert counts.rollbacks > 2 * schedules
    assert counts.promotions > schedules / 10
    assert counts.overtaken == 0


@number_of_schedules(10, 40)
def test_cuts_taken_around_a_promotion_are_states_of_the_training(schedules: int) -> None:
    counts = play(schedules, steps=7, cut_every=2)
    assert counts.promotions > 1.25 * schedules
    assert counts.cuts > 1.25 * schedules
    assert counts.discarded_cuts > schedules / 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"hold": False},
        {"refuse_unsynced": False, "one_at_a_time": False},
        {"previous": False},
        {"recast": False, "voted": True},
    ],
    ids=["answers_before_the_standby", "promotes_half_a_copy", "copies_one_step", "forgets_verdicts"],
)
def test_a_wrong_rule_of_standbys_is_found_out(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a verdict is missing nobody goes on, so the schedule is stuck.
    monkeypatch.setattr("tests.protocol_model.synchronous.LIMIT", 4000)
    assert any_broken(70, **wrong)


def play_async(schedules: int, **options: Any) -> AsyncCounts:
    total = AsyncCounts()
    for seed in range(schedules):
        chosen = AsyncStandbySetup(seed=seed, shard_losses=4, standby_losses=2, kills=3, **options)
        try:
            total.add(AsyncStandbyModel(chosen).run())
        except Broken as broken:
            broken.add_note(f"play it again: AsyncStandbyModel({chosen}).run()")
            raise
    return total


@number_of_schedules(10, 50)
def test_asynchronous_shards_lose_nothing_acknowledged_with_their_primaries(schedules: int) -> None:
    counts = play_async(schedules, give_up=0.05)
    assert counts.promotions > 3 * schedules
    assert counts.lost_with_shard == 0
    assert counts.duplicates > 200 * schedules
    assert counts.out_of_sequence == 0


@pytest.mark.parametrize(
    "wrong",
    [{"hold": False}, {"fenced_records": False}, {"table": False}],
    ids=["answers_before_the_standby", "takes_the_old_primarys_records", "forgets_the_numbers"],
)
def test_a_wrong_asynchronous_rule_of_standbys_is_found_out(wrong: dict[str, Any]) -> None:
    with pytest.raises(Broken):
        play_async(10, **wrong)
