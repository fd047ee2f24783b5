"""What the chief's journal keeps of a run with spares, and which job may repeat it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardline.core.choices import Choices
from shardline.core.spec import ConsistencySpec, JobSpec, ScheduleSpec
from shardline.core.spec_json import job_to_json
from shardline.errors import UsageError
from shardline_chief.io.journal import Journal, run_to_replay
from shardline_chief.rules.actions import Configure, Release
from shardline_chief.rules.flows.servers import REPEATED_CHOICES
from shardline_chief.rules.replay import replay
from shardline_chief.rules.state.settings import ReplayedRun
from shardline_chief.rules.state.state import ChoiceLog
from tests.support.builders import make_job_spec
from tests.support.chief_cluster import Cluster, make_job, running

SPARES = ConsistencySpec(mode="sync:spares=1")


def spare_job(**changes: Any) -> JobSpec:
    return make_job_spec(**{"replicas": 3, "consistency": SPARES, **changes})


def chosen(first: int, *made: int) -> tuple[str, Mapping[str, Any]]:
    choices = Choices(first, made)
    return "chosen", {"first": first, "width": choices.width, "made": choices.packed(choices.width).hex()}


def timeline(number: int, **fields: Any) -> tuple[str, Mapping[str, Any]]:
    return "timeline", {"timeline": number, "state": "preparing", "placement": [], "from_cut": None, **fields}


def remembered(*entries: tuple[str, Mapping[str, Any]]) -> Choices:
    return replay({"kind": kind, "term": 1, **fields} for kind, fields in entries).choices


def test_the_journal_has_the_choices_of_the_surviving_history() -> None:
    start = [("chief", {}), timeline(1), chosen(0, 0b011, 0b101), chosen(2, 0b110)]
    assert remembered(*start) == Choices(0, (0b011, 0b101, 0b110))
    # A failover keeps all values, a rollback does not.
    assert remembered(*start, timeline(2, stays=True), chosen(3, 0b011)) == Choices(0, (0b011, 0b101, 0b110, 0b011))
    back = [*start, timeline(2, from_cut=1), chosen(1, 0b110)]
    assert remembered(*back) == Choices(0, (0b011, 0b110))
    # A chief that takes over continues; a run that is resumed from a checkpoint too, from there.
    assert remembered(*back, ("chief", {"takes_over": 1}), chosen(2, 0b011)) == Choices(0, (0b011, 0b110, 0b011))
    assert remembered(*back, ("chief", {"resume": 1}), timeline(3, from_cut=1), chosen(1, 0b101)) == Choices(
        0, (0b011, 0b101)
    )
    assert remembered(*back, ("chief", {}), timeline(3)) == Choices(0)


def test_the_log_counts_whose_gradients_were_used_and_notes_nothing_twice() -> None:
    log = ChoiceLog()
    owners = {0: "worker/0", 1: "worker/1", 2: "worker/1"}
    for told in (Choices(0, (0b011,)), Choices(0, (0b011, 0b110)), Choices(1, (0b110,))):
        log.add(log.news(told), owners)
    assert log.end == 2
    assert (log.used, log.dropped) == ({"worker/0": 1, "worker/1": 3}, {"worker/0": 1, "worker/1": 1})
    log.back_to(1)
    assert log.news(Choices(1, (0b101,))) == Choices(1, (0b101,))
    # What a lead that was copied too late cannot know is missing.
    log.add(log.news(Choices(5, (0b011,))), owners)
    assert log.end == 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"consistency": ConsistencySpec(mode="async")},
            "--replay repeats synchronous runs only, but in consistency async",
        ),
        ({"seed": 5}, r"that run was of another job \(seed: 5 here, 0 there\)"),
        ({"consistency": ConsistencySpec()}, "consistency.mode: sync here, sync:spares=1 there"),
        ({"schedule": ScheduleSpec(kind="linear", total_steps=3)}, "schedule.kind: linear here"),
        ({"steps": 4}, "has the choices of steps 0 to 2, but the job needs those of steps 0 to 3"),
    ],
)
def test_a_job_that_cannot_repeat_a_run_is_refused(changes: dict[str, Any], sentence: str) -> None:
    run = ReplayedRun("run", spare_job(), Choices(0, (0b011, 0b101, 0b110)))
    run.check(spare_job(steps=3, name="other", checkpoint_every=7))
    run.check(spare_job(steps=2))
    with pytest.raises(UsageError, match=sentence):
        run.check(spare_job(**{"steps": 3, **changes}))


def test_a_run_with_a_gap_is_refused() -> None:
    run = ReplayedRun("run", spare_job(), Choices(2, (0b011,)))
    with pytest.raises(UsageError, match="has the choices of steps 2 to 2, but the job needs those of steps 0 to 2"):
        run.check(spare_job(steps=3))


def test_without_spares_only_the_job_is_compared() -> None:
    job = make_job_spec(replicas=3)
    run = ReplayedRun("run", job, Choices())
    run.check(replace(job, steps=99))
    with pytest.raises(UsageError, match="another job"):
        run.check(replace(job, seed=1))


def test_a_run_that_was_resumed_with_other_settings_is_refused(tmp_path: Path) -> None:
    job = spare_job()
    earlier = replace(job, seed=9)
    with Journal(tmp_path / "chief") as journal:
        journal.begin_term()
        journal.write_all([("chief", {}), ("job", {"spec": job_to_json(earlier)}), timeline(1), chosen(0, 0b011)])
        journal.write_all([("chief", {"resume": 1}), ("job", {"spec": job_to_json(job)}), timeline(2, from_cut=1)])
        journal.write_all([chosen(1, 0b101)])
    run = run_to_replay(tmp_path)
    assert run.earlier == (earlier,) and run.choices == Choices(0, (0b011, 0b101))
    with pytest.raises(UsageError, match="a part of that run, from which it was resumed, was of another job"):
        run.check(replace(job, steps=2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cadence": "easgd", "consistency": ConsistencySpec()}, "with cadence easgd the bits depend on what workers"),
        ({"script": True}, "a script can't repeat choices"),
    ],
)
def test_what_no_journal_can_repeat_is_refused(changes: dict[str, Any], sentence: str) -> None:
    job = spare_job(**changes)
    with pytest.raises(UsageError, match=sentence):
        ReplayedRun("run", job, Choices(0, (0b011,))).check(replace(job, steps=1))


def test_a_journal_to_replay_that_is_no_file_is_named_with_what_to_give_instead(tmp_path: Path) -> None:
    (tmp_path / "chief").mkdir()
    os.mkfifo(tmp_path / "chief" / "journal-1.jsonl")
    with pytest.raises(UsageError, match=r"journal-1\.jsonl can't be read: it is a FIFO.*; give --replay the --out of"):
        run_to_replay(tmp_path)


def test_a_run_is_read_from_its_folder_even_while_it_goes_on(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in it; give the --out of a run"):
        run_to_replay(tmp_path)
    job = spare_job()
    with Journal(tmp_path / "chief") as journal:
        journal.begin_term()
        journal.write_all([("chief", {}), ("job", {"spec": job_to_json(job)}), timeline(1), chosen(0, 0b011)])
        assert run_to_replay(tmp_path) == ReplayedRun(str(tmp_path), job, Choices(0, (0b011,)))


def noted(cluster: Cluster) -> list[tuple[int, str]]:
    """(first step, choices) of each line of the journal."""
    lines = [line for line in cluster.journal if line.kind == "chosen"]
    return [(line.fields["first"], line.fields["made"]) for line in lines]


def test_the_chief_notes_what_the_lead_reports_and_has_it_forget_what_is_noted() -> None:
    cluster = running(mode="sync:spares=1")
    lead = cluster.ps[0]
    lead.choices = Choices(0, (0b0111, 0b1011))
    cluster.advance(2)
    assert noted(cluster) == [(0, "070b")]
    lead.choices = Choices(0, (0b0111, 0b1011, 0b1101))
    cluster.advance(3)
    assert noted(cluster) == [(0, "070b"), (2, "0d")]
    counts = cluster.program.state.choices
    assert counts.used.total() == 9 and counts.dropped.total() == 3
    lead.choices = Choices(0, (0b0111,) * (REPEATED_CHOICES + 1))
    cluster.advance(4)
    assert [order.noted for order in cluster.kinds(Release)][-1] == REPEATED_CHOICES + 1
    assert lead.choices == Choices(REPEATED_CHOICES + 1)
    cluster.advance(5)
    assert len(noted(cluster)) == 3


def test_servers_are_told_what_to_repeat_and_another_job_ends_with_the_difference() -> None:
    job = make_job(mode="sync:spares=1")
    run = ReplayedRun("run", job, Choices(0, (0b0111,) * 100))
    cluster = Cluster(job=job, replayed=run)
    cluster.start()
    assert {order.replayed for order in cluster.kinds(Configure)} == {run.choices}
    cluster = Cluster(job=make_job(mode="sync:spares=1", seed=4), replayed=run)
    cluster.join("ps", 0)
    cluster.join("ps", 1)
    cluster.join("worker", 0)
    assert cluster.finish is not None
    assert "that run was of another job (seed: 4 here, 0 there)" in cluster.finish.reason
