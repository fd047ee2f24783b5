"""The fixed part of `make chaos`: schedules are functions of their seed, and some of them hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.field import why_no_networks
from tests.chaos.play import play
from tests.chaos.schedules import draw


def test_schedule_is_a_function_of_its_seed_and_fifty_of_them_bring_everything() -> None:
    schedules = [draw(seed, standbys=True) for seed in range(50)]
    assert schedules == [draw(seed, standbys=True) for seed in range(50)]
    events = [event for schedule in schedules for event in schedule.events]
    assert {event.kind for event in events} == {"kill", "away", "pause", "cut", "deaf", "slow"}
    roles = {event.task.split("/")[0] for event in events if event.kind == "kill"}
    assert roles == {"chief", "ps", "worker", "evaluator"}
    assert {schedule.mode for schedule in schedules} == {"sync", "async"}


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [6, 7])
def test_schedule_holds(seed: int, tmp_path: Path) -> None:
    play(draw(seed, networks=False), tmp_path)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_schedule_with_cut_links_holds(tmp_path: Path) -> None:
    if reason := why_no_networks():
        pytest.skip(reason)
    play(draw(9), tmp_path)
