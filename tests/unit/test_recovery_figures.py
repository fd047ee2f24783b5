"""What is read off a cluster's events and batches about each kill, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from shardline.core.timeouts import Timeouts
from tests.chaos import figures
from tests.chaos.figures import CASES, Case, kills_of, measure, spread
from tests.chaos.play import Happened, Played
from tests.chaos.schedules import EPOCH

BEGAN_S = 1_000_000.0


def _told(at: float, kind: str, message: str, **fields: Any) -> str:
    stamp = datetime.fromtimestamp(BEGAN_S + at, UTC).isoformat()
    return json.dumps({"time": stamp, "kind": kind, "level": "info", "message": message, **fields}) + "\n"


def _played(folder: Path, case: Case, told: list[str], kills: list[float], marks: list[float]) -> Played:
    schedule = kills_of(case, len(kills))
    (folder / "logs").mkdir()
    (folder / "logs" / "events.jsonl").write_text("".join(told), encoding="utf-8")
    return Played(
        schedule,
        tuple(Happened(event, BEGAN_S + at) for event, at in zip(schedule.events, kills, strict=True)),
        {},
        60.0,
        folder,
        tuple(BEGAN_S + mark for mark in marks),
        {},
        Timeouts(),
    )


def test_a_killed_server_is_noticed_training_stands_still_and_is_back_with_the_first_batch_after_it(
    tmp_path: Path,
) -> None:
    told = [
        _told(9.5, "ps_lost", "ps/0 was lost before"),
        _told(10.25, "life", "worker/1 is silent"),
        _told(10.5, "ps_lost", "ps/0 broke its stream; all shards go back"),
        _told(11.0, "recovered", "ps/0 was last heard 1.0 s ago", lost=4),
        _told(20.125, "life", "ps/1 is silent"),
        _told(21.0, "recovered", "ps/1 was last heard 1.0 s ago", lost=7),
    ]
    marks = [9.0, 9.9, 10.2, 12.2, 12.3, 19.9, 20.9, 21.0]
    rows = measure(_played(tmp_path, Case("ps", "sync"), told, [10.0, 20.0], marks))
    assert [row["task"] for row in rows] == ["ps/0", "ps/1"]
    assert [row["noticed_s"] for row in rows] == [0.5, 0.125]
    assert [row["again"] for row in rows] == [4, 7]
    # Of the first the longest time is the one before the next kill; of the second it began before the kill.
    assert (rows[0]["stall_s"], rows[0]["resumed_s"]) == (7.6, 9.9)
    assert (rows[1]["stall_s"], rows[1]["resumed_s"]) == (1.0, 0.9)


def test_a_chief_is_back_when_the_next_one_has_taken_over_though_training_never_stopped(tmp_path: Path) -> None:
    told = [_told(10.75, "takeover", "this is chief 2"), _told(11.5, "adopted", "the job is as it was")]
    (row,) = measure(_played(tmp_path, Case("chief", "async"), told, [10.0], [9.95, 10.0, 10.25, 10.5]))
    assert (row["noticed_s"], row["resumed_s"], row["stall_s"], row["again"]) == (0.75, 1.5, 0.25, 0)


def test_an_evaluator_and_an_asynchronous_worker_are_back_when_the_next_one_has_joined(tmp_path: Path) -> None:
    for number, (case, task) in enumerate(((Case("evaluator", "sync"), "evaluator/0"), (CASES[1], "worker/0"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        told = [
            _told(10.25, "life", f"{task} is silent"),
            _told(10.5, "joined", "worker/1 joined from 127.0.0.1"),
            _told(11.25, "joined", f"{task} joined from 127.0.0.1"),
        ]
        (row,) = measure(_played(folder, case, told, [10.0], [10.0, 10.125, 10.25]))
        assert (row["noticed_s"], row["resumed_s"], row["stall_s"]) == (0.25, 1.25, 0.125)


def test_a_kill_of_which_nothing_is_known_has_no_figures_and_spoils_no_median(tmp_path: Path) -> None:
    (row,) = measure(_played(tmp_path, Case("worker", "sync"), [], [10.0], []))
    assert (row["noticed_s"], row["stall_s"], row["resumed_s"]) == (None, None, None)
    assert spread([row], "noticed_s") is None
    rows = [{"noticed_s": value} for value in (3.0, None, 1.0, 2.0)]
    assert spread(rows, "noticed_s") == {"median": 2.0, "worst": 3.0, "of": 3}


def test_kills_of_a_role_fall_on_each_of_its_tasks_and_go_on_where_the_job_before_left_off() -> None:
    for case in CASES:
        schedule = kills_of(case, 5, first=5)
        assert len(schedule.events) == 5 and {event.kind for event in schedule.events} == {"kill"}
        tasks = [event.task for event in schedule.events]
        two = case.role in ("ps", "worker")
        assert tasks == [f"{case.role}/{(5 + number) % 2 if two else 0}" for number in range(5)]
        places = [event.at for event in schedule.events]
        assert places == sorted(set(places)) and places[-1] < 1.0
        assert schedule.mode == "sync" or schedule.steps % EPOCH == 0


def _case(**changes: Any) -> dict[str, Any]:
    figure = {"median": 0.5, "worst": 1.25, "of": 20}
    machine = {"cores": 2, "cpu": "X", "commit": "abcdef123", "clean": True, "load_before": [0.5]}
    case = {"case": "ps, sync", "kills": 20, "jobs": 4, "held": 4, "broken": [], "noticed_s": figure}
    case |= {"stall_s": figure, "resumed_s": None, "again": figure, "machine": machine, "cold": False}
    return {**case, "timeout_s": 18.0, "checkpoint_every": 10, **changes}


def test_page_says_what_each_death_cost_and_which_jobs_are_broken() -> None:
    few = {"median": 0.5, "worst": 1.25, "of": 19}
    chief = _case(case="chief, sync", held=3, broken=["other bits"], resumed_s=few)
    lines = list(report.recovery({"cases": [_case(), chief]}))
    assert "| ps, sync | 20 | 0.5 (1.25) | 0.5 (1.25) |  | 0.5 (1.25) | 4 of 4 |" in lines
    assert (
        "| chief, sync | 20 | 0.5 (1.25) | 0.5 (1.25) | 0.5 (1.25, of 19) | 0.5 (1.25) | 3 of 4: **broken** |" in lines
    )
    assert "- Broken: chief, sync: other bits" in lines
    assert "(2 cores of an X; commits abcdef1; load at most 0.5 before.)" in lines
    assert "0.3 s later, as a fork" in " ".join(lines)


def test_a_run_of_figures_counts_jobs_that_did_not_hold(tmp_path: Path, monkeypatch: Any) -> None:
    played = _played(tmp_path, Case("chief", "sync"), [_told(10.5, "adopted", "as it was")], [10.0], [9.0, 11.0])
    tries = iter([AssertionError(f"other bits in {tmp_path}/jobs"), None])

    def play(schedule: Any, folder: Path, *rest: Any, **more: Any) -> Played:
        error = next(tries)
        if error is not None:
            raise error
        return dataclasses.replace(played, schedule=schedule)

    monkeypatch.setattr(figures, "play", play)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    found = figures.run(Case("chief", "sync"), 2, 1, None, tmp_path / "jobs")  # type: ignore[arg-type]
    assert (found["kills"], found["jobs"], found["held"]) == (1, 2, 1)
    assert found["resumed_s"] == {"median": 0.5, "worst": 0.5, "of": 1}
    (sentence,) = found["broken"]
    assert sentence == "other bits in jobs; logs: jobs/chief-sync-0" and (tmp_path / "jobs" / "chief-sync-0").is_dir()
    assert not (tmp_path / "jobs" / "chief-sync-1").exists()
    assert "BROKEN: other bits" in figures.table([found])
