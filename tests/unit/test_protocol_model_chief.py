"""The chief dies and comes back in thousands of places; what it had decided is neither lost nor done twice.

Seeds are fixed, so a failure names a schedule that can be played again: ChiefModel(setup).run().
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol_model.chief import ChiefModel
from tests.protocol_model.chief_tasks import ChiefSetup, Counts
from tests.protocol_model.numbers import Broken
from tests.support.covering import number_of_schedules


def setup(seed: int, *, synchronous: bool, **options: Any) -> ChiefSetup:
    fields = {"chief_kills": 6, "worker_kills": 6, "steps": 25 if synchronous else 60, **options}
    return ChiefSetup(seed=seed, servers=1 + seed % 3, workers=1 + seed // 3 % 3, synchronous=synchronous, **fields)


def play(schedules: int, *, synchronous: bool, **options: Any) -> Counts:
    total = Counts()
    for seed in range(schedules):
        schedule = setup(seed, synchronous=synchronous, **options)
        try:
            total.add(ChiefModel(schedule).run())
        except Broken as broken:
            broken.add_note(f"play it again: ChiefModel({schedule}).run()")
            raise
    return total


def broken(schedules: int, **options: Any) -> int:
    def fails(seed: int) -> bool:
        try:
            ChiefModel(setup(seed, **options)).run()
        except Broken:
            return True
        return False

    return sum(map(fails, range(schedules)))


@number_of_schedules(18, 30)
def test_synchronous_steps_go_on_without_a_chief_and_end_in_the_same_bits_with_the_next_one(schedules: int) -> None:
    counts = play(schedules, synchronous=True)
    assert counts.adopted > 70 / 30 * schedules
    assert counts.steps_alone > 100 / 30 * schedules
    assert counts.fenced > 50 / 30 * schedules
    assert counts.refused_commands > schedules


@number_of_schedules(9, 30)
def test_with_servers_lost_as_well_the_next_chief_goes_back_to_a_checkpoint_and_the_bits_stay_equal(
    schedules: int,
) -> None:
    counts = play(schedules, synchronous=True, server_kills=3)
    assert counts.timelines > 2 * schedules
    assert counts.adopted > 40 / 30 * schedules


def test_no_batch_is_left_out_and_an_acknowledged_one_is_not_handed_out_again() -> None:
    counts = play(20, synchronous=False)
    assert counts.adopted > 50
    assert counts.asked_again > 100
    assert counts.repeated > 100


def test_with_servers_lost_as_well_every_checkpoint_holds_what_it_counts_as_done() -> None:
    counts = play(20, synchronous=False, server_kills=3)
    assert counts.timelines > 40
    assert counts.cuts > 300


@pytest.mark.parametrize("rule", ["terms", "note_active_first", "compare"])
def test_a_wrong_rule_of_the_chief_is_found_out_in_synchronous_mode(rule: str) -> None:
    assert broken(25, synchronous=True, server_kills=2, chief_kills=20, rage=0.03, **{rule: False}) > 1


@pytest.mark.parametrize("rule", ["note_done", "note_issued", "same_lease", "forget_copies", "note_fences"])
def test_a_wrong_rule_of_the_chief_is_found_out_in_asynchronous_mode(rule: str) -> None:
    assert broken(9, synchronous=False, **{rule: False}) > 1
