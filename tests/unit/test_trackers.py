"""Services that show a run's curves: the chief hands values to them and never waits."""

from __future__ import annotations

import importlib.metadata
import inspect
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardline.core.points import Point, TrackedRun
from shardline.errors import UsageError
from shardline.observability.metrics import Metrics
from shardline_chief.io import trackers
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.trackers import TrackerThread, tracker_named
from tests.support.builders import make_job_spec
from tests.support.waiting import wait_for

RUN = TrackedRun(Path("/runs/one"), "job", {"steps": 3})


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.points: list[Point] = []
        self.closed = False

    def write(self, points: Sequence[Point]) -> None:
        self.points += points

    def close(self) -> None:
        self.closed = True


def test_values_arrive_in_order_and_all_of_them_before_the_end() -> None:
    made: list[Kept] = []

    def make(run: TrackedRun) -> Kept:
        made.append(Kept(run))
        return made[0]

    tracker = TrackerThread("kept", make, RUN)
    for step in range(2500):
        tracker.put("loss", step / 2, step)
    tracker.close()
    assert [point[:3] for point in made[0].points] == [("loss", step / 2, step) for step in range(2500)]
    assert (made[0].run, made[0].closed, tracker.problem) == (RUN, True, "")


def test_a_tracker_that_fails_says_so_once_and_costs_nothing_else() -> None:
    def make(run: TrackedRun) -> Kept:
        raise SystemExit("no key")

    tracker = TrackerThread("far", make, RUN)
    wait_for(lambda: bool(tracker.problem), "the tracker to fail")
    assert tracker.problem == "tracker far takes no more values (SystemExit: no key)"
    tracker.problem = ""
    tracker.put("loss", 1.0, 1)
    tracker.close()
    assert not tracker.problem


def test_a_tracker_that_hangs_loses_values_but_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "QUEUED", 3)
    monkeypatch.setattr(trackers, "END_S", 0.05)
    released = threading.Event()

    class Hanging(Kept):
        def write(self, points: Sequence[Point]) -> None:
            released.wait(60.0)

    tracker = TrackerThread("slow", Hanging, RUN)
    for step in range(9):
        tracker.put("loss", 1.0, step)
    assert tracker.problem == "tracker slow is slower than the job: values are missing there"
    tracker.close()
    assert tracker.problem.startswith("tracker slow did not take the last values within")
    released.set()


def test_the_chief_tells_a_tracker_what_tensorboard_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kept] = []

    def make(run: TrackedRun) -> Kept:
        made.append(Kept(run))
        return made[-1]

    monkeypatch.setattr(trackers, "tracker_named", {"kept": make}.__getitem__)
    reporter = Reporter(tmp_path / "logs", Metrics("chief", "chief/0"), trackers=("kept",))
    for timeline in (1, 2):
        reporter.begin(replicas=1, joined=True, timeline=timeline, first_step=0, job=make_job_spec())
        reporter.evaluation(10 * timeline, {"accuracy": 0.5})
    reporter.close()
    (kept,) = made
    assert [point[:3] for point in kept.points] == [
        ("evaluation/accuracy", 0.5, 10),
        ("evaluation/accuracy", 0.5, 20),
    ], "one run of the service, whatever the timeline"
    assert (kept.run.out, kept.run.job) == (tmp_path, make_job_spec().name) and kept.closed


def test_every_tracker_that_is_offered_says_what_it_needs() -> None:
    names = {entry.name for entry in importlib.metadata.entry_points(group="shardline.trackers")}
    assert names >= {"wandb", "mlflow"}
    for name in names:
        module = inspect.getmodule(tracker_named(name))
        assert module is not None and module.REQUIRES, name
    with pytest.raises(UsageError, match="no installed package provides the tracker 'wand'"):
        tracker_named("wand")
