"""Spares under random deaths, without a network; and under rules that are wrong.

Seeds are fixed, so a failure names a schedule that can be played again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.protocol_model.numbers import Broken
from tests.protocol_model.spares import SpareModel, SpareSetup
from tests.support.covering import number_of_schedules

SHAPES = [(1,), (3,), (1, 1), (2, 3), (2, 1, 2), (1, 1, 1, 1)]


def setup(seed: int, **fixed: Any) -> SpareSetup:
    draw = random.Random(-1 - seed)
    replicas = draw.randint(2, 5)
    drawn: dict[str, Any] = {
        "shards": draw.choice(SHAPES),
        "replicas": replicas,
        "workers": draw.randint(1, replicas),
        "spares": draw.randint(1, replicas - 1),
        "kills": draw.randint(0, 8),
        "steps": 6,
    }
    return SpareSetup(seed=seed, **{**drawn, **fixed})


def play(schedules: int, **options: Any) -> list[SpareModel]:
    played = []
    for seed in range(schedules):
        model = SpareModel(setup(seed, **options))
        try:
            model.run()
        except Broken as broken:
            broken.add_note(f"play it again: SpareModel({setup(seed, **options)}).run()")
            raise
        played.append(model)
    return played


def any_broken(schedules: int, **options: Any) -> bool:
    def fails(seed: int) -> bool:
        try:
            SpareModel(setup(seed, **options)).run()
        except Broken:
            return True
        return False

    return any(map(fails, range(schedules)))


@number_of_schedules(30, 600)
def test_every_step_is_made_of_one_choice_whoever_dies_and_whatever_comes_late(schedules: int) -> None:
    played = play(schedules)
    assert sum(model.counts.kills for model in played) > schedules
    assert sum(model.late for model in played) > 5 * schedules
    assert sum(model.counts.overtaken for model in played) > schedules / 10


@number_of_schedules(20, 300)
def test_a_new_lead_keeps_what_the_old_one_chose(schedules: int) -> None:
    played = play(schedules, ps_kills=4, standby_kills=2)
    assert sum(model.counts.promotions for model in played) > schedules
    assert all(model.counts.rollbacks == 0 for model in played)


@number_of_schedules(15, 200)
def test_after_a_rollback_steps_are_chosen_anew(schedules: int) -> None:
    played = play(schedules, ps_kills=4, standby_kills=2, one_at_a_time=False, cut_every=2, steps=7)
    assert sum(model.counts.rollbacks for model in played) > schedules
    assert sum(model.counts.cuts for model in played) > schedules


@number_of_schedules(15, 200)
def test_a_replay_makes_the_same_bits_whoever_is_fast_this_time(schedules: int) -> None:
    for seed in range(schedules):
        first = setup(seed, ps_kills=2)
        model = SpareModel(first)
        model.run()
        other = {"kills": 4, "ps_kills": 4, "standby_kills": 2, "one_at_a_time": False, "workers": 1 + seed % 2}
        # The seed decides the numbers, so that it is kept; the dice are not.
        again = SpareModel(setup(seed, replayed=tuple(model.made), **other))
        again.random = random.Random(10_000 + seed)
        again.run()
        assert again.made == model.made
        assert again.expected == model.expected


@number_of_schedules(10, 100)
def test_without_spares_nobody_is_late(schedules: int) -> None:
    played = play(schedules, spares=0, ps_kills=2)
    assert all(model.counts.overtaken == 0 for model in played)


@pytest.mark.parametrize(
    "wrong",
    [{"lead_chooses": False}, {"hears_all": False, "ps_kills": 4, "standby_kills": 2}],
    ids=["each_shard_chooses", "chooses_before_it_has_heard_all"],
)
def test_a_wrong_rule_of_spares_is_found_out(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.protocol_model.synchronous.LIMIT", 4000)
    assert any_broken(200, **wrong)
