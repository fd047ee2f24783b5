"""Aggregators under thousands of random schedules; see test_protocol_model.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.protocol_model.aggregators import AggregatedModel
from tests.protocol_model.numbers import Broken
from tests.protocol_model.tasks import Counts
from tests.support.covering import number_of_schedules
from tests.unit.test_protocol_model import setup


def play(schedules: int, **options: Any) -> tuple[Counts, int]:
    total, shared = Counts(), 0
    for seed in range(schedules):
        model = AggregatedModel(setup(seed, **{"steps": 8, "kills": 8, **options}), aggregators=1 + seed % 2)
        try:
            total.add(model.run())
        except Broken as broken:
            broken.add_note(f"play it again: seed {seed}, {options}")
            raise
        shared += model.shared
    return total, shared


@number_of_schedules(60, 3000)
def test_bits_stay_whichever_aggregator_dies_and_whoever_leaves_it(schedules: int) -> None:
    counts, shared = play(schedules)
    assert shared > schedules / 4, "sums of several contributions have left"
    assert counts.splits > schedules / 3
    assert counts.duplicates > 10 * schedules
    assert counts.overtaken == 0


@number_of_schedules(20, 500)
@pytest.mark.parametrize("more", [{"voted": True}, {"ps_kills": 3, "cut_every": 2, "steps": 6}], ids=str)
def test_with_votes_and_with_shards_that_die(more: dict[str, Any], schedules: int) -> None:
    counts, shared = play(schedules, **more)
    assert shared > schedules / 10
    assert counts.skipped_steps or counts.rollbacks


@number_of_schedules(30, 300)
def test_an_aggregator_that_skips_the_step_before_leaves_workers_without_it(schedules: int) -> None:
    def fails(seed: int) -> bool:
        try:
            AggregatedModel(setup(seed, steps=8, kills=8), looks_back=False).run()
        except Broken:
            return True
        return False

    assert any(map(fails, range(schedules)))
