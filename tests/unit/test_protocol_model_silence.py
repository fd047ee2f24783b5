"""Tasks and their judge are stopped in thousands of places; only who was silent while somebody could hear it is dead.

Seeds are fixed, so a failure names a schedule that can be played again: SilenceModel(setup).run().
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.protocol_model.numbers import Broken
from tests.protocol_model.silence import SilenceModel, SilenceSetup
from tests.support.covering import number_of_schedules


def play(schedules: int, **options: Any) -> Counter[str]:
    total = Counter[str]()
    for seed in range(schedules):
        setup = SilenceSetup(seed=seed, **options)
        try:
            total += SilenceModel(setup).run()
        except Broken as broken:
            broken.add_note(f"play it again: SilenceModel({setup}).run()")
            raise
    return total


def is_broken(seed: int, **options: Any) -> bool:
    try:
        SilenceModel(SilenceSetup(seed=seed, **options)).run()
    except Broken:
        return True
    return False


@number_of_schedules(30, 300)
def test_a_judge_that_was_stopped_takes_nobody_for_dead_who_was_there_while_it_ran(schedules: int) -> None:
    counts = play(schedules)
    assert counts["all"] > schedules and counts["judge"] > schedules
    # The killed, and those that were stopped alone for long.
    assert counts["deaths"] > schedules


@number_of_schedules(15, 150)
def test_short_timeouts_hold_as_well(schedules: int) -> None:
    play(schedules, timeout_s=4.5)


def test_silences_measured_by_the_clock_kill_the_living() -> None:
    assert sum(is_broken(seed, clock=lambda: lambda now_s: now_s) for seed in range(20)) > 10


def test_a_clock_that_leaves_gaps_out_altogether_where_they_are_short_waits_for_the_killed_for_ever() -> None:
    assert all(is_broken(seed, clock=lambda: lambda now_s: 0.0) for seed in range(5))
