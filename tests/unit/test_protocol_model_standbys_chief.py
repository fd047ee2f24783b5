"""Chiefs that die together with servers that have standbys, without a network; and rules that are wrong.

Seeds are fixed, so a failure names a schedule that can be played again.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol_model.numbers import Broken
from tests.protocol_model.standbys_chief import ChiefStandbyModel, ChiefStandbySetup
from tests.protocol_model.tasks import Counts
from tests.support.covering import number_of_schedules

SHAPES = [(1, 1), (2, 3), (2, 1, 2), (1, 1, 1, 1)]


def setup(seed: int, **fixed: Any) -> ChiefStandbySetup:
    replicas = 1 + seed % 3
    drawn: dict[str, Any] = {
        "shards": SHAPES[seed % len(SHAPES)],
        "replicas": replicas,
        "workers": 1 + seed // 3 % replicas,
        "kills": seed % 5,
        "steps": 6,
        "ps_kills": 5,
        "standby_kills": 1,
        "chief_kills": 6,
        "give_ups": 2,
    }
    return ChiefStandbySetup(seed=seed, **{**drawn, **fixed})


def play(schedules: int, **options: Any) -> tuple[Counts, int]:
    total, taken_over = Counts(), 0
    for seed in range(schedules):
        model = ChiefStandbyModel(setup(seed, **options))
        try:
            total.add(model.run())
        except Broken as broken:
            broken.add_note(f"play it again: ChiefStandbyModel({setup(seed, **options)}).run()")
            raise
        taken_over += model.taken_over
    return total, taken_over


@number_of_schedules(24, 120)
def test_a_server_lost_with_its_chief_or_in_a_failover_that_its_chief_did_not_end_costs_no_rollback(
    schedules: int,
) -> None:
    counts, taken_over = play(schedules)
    assert counts.rollbacks == counts.overtaken == 0
    assert counts.promotions > 1.25 * schedules
    assert taken_over > schedules / 2


@number_of_schedules(18, 60)
def test_servers_and_chiefs_that_die_at_any_time_cost_rollbacks_and_no_bits(schedules: int) -> None:
    counts, taken_over = play(schedules, one_at_a_time=False)
    assert counts.rollbacks > schedules
    assert counts.overtaken == 0
    assert taken_over > schedules / 12


def test_a_standby_that_was_given_up_and_is_appointed_again_is_believed_once_it_was_copied_for_that() -> None:
    often = {"one_at_a_time": False, "give_ups": 4, "both_die": 2}
    counts, _ = play(60, **often)
    assert counts.rollbacks > 60
    with pytest.raises(Broken, match="promoted that is behind"):
        play(60, appointments=False, **often)


def test_a_chief_that_does_not_ask_goes_back_although_nothing_is_lost() -> None:
    counts, _ = play(40, asks=False)
    assert counts.rollbacks > 10
