"""A few fixed schedules; many more, drawn from seeds: make chaos."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardline_pipeline import PIPELINES, schedule_named
from tests.chaos.network import why_no_networks
from tests.chaos.nursery import Nursery, Starter
from tests.chaos.play import play
from tests.chaos.schedules import (
    APART,
    BEHIND,
    BESIDE,
    EPOCH,
    EVERYBODY,
    LINKS,
    LONG_S,
    NEGATIVE,
    PACED,
    PAUSED,
    PLAIN,
    PROTECTED,
    SPARE,
    SUMMED,
    Event,
    Schedule,
    draw,
)

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(200)]


PAUSES = {("pause", "chief/0"), ("freeze", EVERYBODY)}


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Nursery() as nursery:
        yield nursery


def schedule(*events: Event, mode: str = "sync", networks: bool = False) -> Schedule:
    sync = mode in ("sync", SPARE)
    return Schedule(
        seed=-1,
        mode=mode,
        ps=2,
        workers=2,
        replicas=3 if sync else 1,
        steps=80 if sync else 5 * EPOCH,
        every=10 if sync else 24,
        networks=networks,
        events=events,
    )


@pytest.mark.parametrize("mode", ["sync", SPARE])
def test_a_server_a_chief_and_a_worker_that_are_killed_leave_no_trace_in_the_parameters(
    tmp_path: Path, starter: Starter, mode: str
) -> None:
    killed = ("ps/1", "chief/0", "worker/0", "evaluator/0")
    events = [Event(at=0.2 + 0.18 * number, kind="kill", task=task) for number, task in enumerate(killed)]
    found = play(schedule(*events, mode=mode), tmp_path, starter)
    assert [found.codes[name][0] for name in killed] == [-9] * 4
    assert [recovery["task"] for recovery in found.summary["recoveries"]] == ["ps/1"]
    assert found.summary["chief_restarts"] == 1


def test_a_worker_that_wakes_after_it_was_given_up_changes_nothing_in_an_asynchronous_job(
    tmp_path: Path, starter: Starter
) -> None:
    events = (
        Event(at=0.2, kind="pause", task="worker/1", seconds=LONG_S),
        Event(at=0.5, kind="kill", task="ps/0"),
    )
    found = play(schedule(*events, mode="async"), tmp_path, starter)
    assert found.codes["worker/1"][0] == 7
    assert [recovery["task"] for recovery in found.summary["recoveries"]] == ["ps/0"]


@pytest.mark.parametrize("after", [(), ("chief/0",)], ids=["", "and-then-the-chief"])
def test_the_updates_of_a_worker_that_dies_with_its_server_are_counted_as_lost(
    tmp_path: Path, starter: Starter, after: tuple[str, ...]
) -> None:
    later = [Event(at=0.8, kind="kill", task=task) for task in after]
    events = (Event(at=0.55, kind="together", task="ps/1", peer="worker/0"), *later)
    found = play(replace(schedule(*events, mode="async"), every=60), tmp_path, starter)
    lost, (recovery,) = found.summary["lost_updates"], found.summary["recoveries"]
    assert lost >= recovery["lost"] > 0
    assert found.summary["chief_restarts"] == len(after)


@pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks() or "links can be cut here")
def test_a_worker_that_reaches_the_chief_and_not_a_server_is_given_up_and_comes_back(
    tmp_path: Path, starter: Starter
) -> None:
    events = (Event(at=0.25, kind="cut", task="worker/0", peer="ps/1", seconds=LONG_S),)
    found = play(schedule(*events, networks=True), tmp_path, starter)
    assert found.summary["recoveries"] == []


def test_a_server_that_dies_with_the_chief_and_a_chief_that_dies_while_it_writes_a_checkpoint_leave_no_trace(
    tmp_path: Path, starter: Starter
) -> None:
    events = (
        Event(at=0.25, kind="together", task="chief/0", peer="ps/1"),
        Event(at=0.55, kind="writing", task="chief/0"),
    )
    found = play(schedule(*events), tmp_path, starter)
    assert [found.codes[name][0] for name in ("chief/0", "ps/1")] == [-9] * 2
    assert found.codes["chief/0"][:2] == (-9, -9)


@pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks() or "links can be cut here")
def test_pushes_whose_connections_are_reset_are_made_again_and_count_once(tmp_path: Path, starter: Starter) -> None:
    events = (
        Event(at=0.25, kind="reset", task="ps/0", peer="worker/0", seconds=0.2),
        Event(at=0.6, kind="reset", task="ps/1", peer="worker/1", seconds=0.2),
    )
    play(schedule(*events, mode="async", networks=True), tmp_path, starter)


def test_a_pipeline_without_a_flush_goes_back_to_its_newest_checkpoint_whatever_dies(
    tmp_path: Path, starter: Starter
) -> None:
    found = play(draw(63), tmp_path, starter)
    assert found.schedule.unbroken and found.schedule.apply == "worker"
    assert all(-9 in found.codes[name] for name in ("worker/0", "worker/1"))
    assert len(found.summary["recoveries"]) >= 2


def test_stages_whose_replicas_do_not_wait_go_back_to_their_newest_checkpoint_whatever_dies(
    tmp_path: Path, starter: Starter
) -> None:
    found = play(draw(239), tmp_path, starter)
    assert found.schedule.apart
    assert len(found.summary["recoveries"]) >= 2


def test_soft_sync_and_a_job_of_another_kind_beside_it_hold_whatever_dies_in_either(
    tmp_path: Path, starter: Starter
) -> None:
    drawn = draw(BESIDE + 1)
    assert drawn.mode == SUMMED and drawn.beside is not None and drawn.beside.team
    found = play(drawn, tmp_path, starter)
    assert -9 in found.codes["worker/1"]


def test_a_seed_gives_the_same_schedule_each_time_and_all_kinds_of_events_happen() -> None:
    drawn = [draw(seed) for seed in range(60)]
    assert drawn == [draw(seed) for seed in range(60)]
    kinds = {event.kind for one in drawn for event in one.events}
    assert kinds == {"kill", "away", "pause", "second", *LINKS, "together", "writing", "reset"}
    roles = {event.task.split("/")[0] for one in drawn for event in one.events if event.kind == "kill"}
    assert roles == {"chief", "ps", "worker", "evaluator"}
    assert {one.mode for one in drawn} == {"sync", "sync:spares=1", "async", "ssp:slack=2"}
    assert any(one.standbys for one in drawn) and any(one.codec != "raw" for one in drawn)
    links = {*LINKS, "reset"}
    assert not any(event.kind in links for seed in range(60) for event in draw(seed, networks=False).events)


def test_every_schedule_of_a_pipeline_is_drawn_with_either_owner_of_the_optimizer() -> None:
    made = [schedule_named(one.name) for one in PIPELINES]
    # One that warns of itself came later.
    for seeds, all_ in ((range(100), False), (range(NEGATIVE, NEGATIVE + 40), True)):
        drawn = [one for one in map(draw, seeds) if one.pipeline != "whole-model"]
        names = [one.name for one in made if one.staged and (all_ or not one.warning)]
        expected = {(name, who) for name in names for who in ("server", "worker")}
        assert {(one.pipeline.partition(":")[0], one.apply) for one in drawn} == expected
    drawn = [one for one in map(draw, range(100)) if one.pipeline != "whole-model"]
    assert all(one.seed >= PLAIN and one.mode == "sync" for one in drawn)
    assert {one.replicas for one in drawn} == {1, 2} and any(one.codec_parcels for one in drawn)
    assert {one.unbroken for one in drawn if one.standbys} == {False}


def test_every_schedule_of_a_pipeline_is_drawn_with_replicas_that_do_not_wait_and_earlier_seeds_draw_none() -> None:
    assert not any(draw(seed).apart for seed in range(APART))
    drawn = [one for one in map(draw, range(APART, APART + 70)) if one.apart]
    names = {one.name for one in PIPELINES if schedule_named(one.name).staged}
    assert {(one.pipeline, one.mode) for one in drawn} == {(name, mode) for name in names for mode in ("async", PACED)}
    assert all(one.apply == "server" and not one.standbys and not one.clip_norm for one in drawn)
    assert {one.workers for one in drawn if one.mode == PACED} == {6}
    later = [one for one in map(draw, range(PROTECTED, PROTECTED + 40)) if one.apart]
    assert [one.standbys for one in later] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("kind", "task"), [("pause", "chief/0"), ("freeze", EVERYBODY)])
def test_a_pause_of_the_chief_or_of_everybody_costs_nothing_at_all(
    tmp_path: Path, starter: Starter, kind: str, task: str, mode: str
) -> None:
    plain = schedule(Event(at=0.4, kind=kind, task=task, seconds=LONG_S), mode=mode)
    found = play(replace(plain, standbys=int(mode == "async")), tmp_path, starter)
    assert set(found.codes.values()) == {(0,)}
    assert found.summary["recoveries"] == []
    assert (found.summary["lost_updates"], found.summary["repeated_batches"]) == (0, 0)


def test_later_seeds_pause_the_chief_and_everybody_and_earlier_ones_only_one_task() -> None:
    assert not any(event.kind == "freeze" for seed in range(PAUSED) for event in draw(seed).events)
    drawn = [draw(seed) for seed in range(PAUSED, PAUSED + 40)]
    assert all(any((e.kind, e.task) in PAUSES for e in one.events) for one in drawn)
    assert {(e.kind, e.task) for one in drawn for e in one.events} >= PAUSES
    assert {one.standbys for one in drawn} == {0, 1}


def test_the_last_seeds_have_neighbours_and_workers_that_share_layers_and_earlier_ones_have_neither() -> None:
    assert not any(draw(seed).beside or draw(seed).team for seed in range(BESIDE))
    drawn = [draw(seed) for seed in range(BESIDE, BESIDE + 20)]
    assert all(one.beside is not None and one.beside.team and not one.beside.networks for one in drawn)
    assert sum(one.team for one in drawn) == 4 and sum(one.mode == SUMMED for one in drawn) == 2


def test_jobs_behind_aggregators_are_drawn_with_codecs_and_earlier_seeds_draw_none() -> None:
    assert {draw(seed).topology for seed in range(BEHIND)} == {"flat"}
    drawn = [one for one in map(draw, range(BEHIND, BEHIND + 40)) if one.topology != "flat"]
    assert len(drawn) == 16 and {one.topology for one in drawn} == {"aggregators", "local-sum"}
    assert all(one.aggregators == 0 for one in drawn if one.topology == "local-sum")
    hit = [{event.task for event in one.events} for one in drawn]
    assert all(tasks & {"aggregator/0", "aggregator/1", "worker/0"} for tasks in hit)
    assert {one.standbys for one in drawn} == {0, 1} and len({one.codec for one in drawn}) > 4


def test_kinds_of_events_that_came_later_leave_the_first_seeds_as_they_were() -> None:
    later = {"together", "writing", "reset"}
    assert not any(event.kind in later for seed in range(PLAIN) for event in draw(seed).events)
    assert all(draw(seed).events[-1].kind in later for seed in range(PLAIN, PLAIN + 10))


def test_jobs_with_tables_are_those_of_the_first_seeds_otherwise() -> None:
    for seed in (700, 711, 752):
        drawn = draw(seed)
        assert drawn.tables and drawn.pipeline == "whole-model" and drawn.codec == "raw"
        assert drawn.events == draw((seed - 700) % 50).events
    assert not any(draw(seed).tables for seed in range(0, 700, 7))
