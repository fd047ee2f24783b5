"""What the chief gathers for people: the pace of tasks, checkpoints on disk, curves, and the status made of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardline.cli import options
from shardline.core.orders import StepReport
from shardline.errors import ClusterSpecError
from shardline.observability.metrics import Metrics
from shardline.observability.view import cluster_view
from shardline_chief.io.reporter import Reporter, Shelf, TaskSpeed
from shardline_chief.io.summary import overview
from tests.support.chief_cluster import Cluster, make_job, running


def report(step: int, replica: int = 0, **fields: Any) -> StepReport:
    return StepReport(step=step, replica=replica, samples=8, **{"loss": 1.0, **fields})


def curve(reporter: Reporter, name: str) -> list[tuple[float, float]]:
    return [(x, y) for _, x, y in reporter.history.since()["curves"][name]["points"]]


def test_pace_is_the_mean_of_the_last_steps() -> None:
    pace = TaskSpeed()
    assert set(pace.means().values()) == {0.0}
    for step in range(1000):
        pace.add(report(step, staleness=step % 2 * 4, data_s=0.125, compute_s=0.25, exchange_s=0.5))
    means = pace.means()
    assert [means[name] for name in ("staleness", "data_s", "compute_s", "exchange_s")] == [2.0, 0.125, 0.25, 0.5]
    assert pace.steps == 1000


def test_the_whole_of_a_worker_is_its_staleness_by_step_and_the_time_that_it_waited_for_others() -> None:
    pace = TaskSpeed()
    for step in range(1000):
        for replica in (0, 1):
            pace.add(report(step, replica, staleness=step % 3, blocked_s=0.5, drift=1.5 + replica))
    assert (pace.means()["blocked_s"], pace.means()["drift"]) == (0.5, 2.0)
    assert pace.whole() == {
        "steps": 1000,
        "blocked_seconds": 500.0,
        "staleness": {"0": 334, "1": 333, "2": 333},
        "drift": 2.0,
        "gap": 0.0,
    }


def test_a_worker_of_several_replicas_makes_one_step_of_their_reports() -> None:
    pace = TaskSpeed()
    for step in (7, 7, 7, 8, 8, 8, 3):
        pace.add(report(step))
    assert pace.steps == 3


def test_the_shelf_knows_sizes_and_ages_and_forgets_what_retention_took(tmp_path: Path) -> None:
    shelf = Shelf()
    for step in (10, 20):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        (folder / "shard").write_bytes(b"x" * step)
        os.utime(folder, (1000.0, 1000.0))
        shelf.put(step, folder)
    assert [(c.step, c.bytes, c.age_s) for c in shelf.list(1003.0)] == [(10, 10, 3.0), (20, 20, 3.0)]
    (tmp_path / "step-10" / "shard").unlink()
    (tmp_path / "step-10").rmdir()
    shelf.put(20, tmp_path / "step-20")
    assert [c.step for c in shelf.list(1003.0)] == [20]


def test_steps_rates_and_scores_become_curves_and_a_rollback_takes_back_what_it_undoes(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=2, joined=True, timeline=5, first_step=0)
    for step in range(4):
        reporter.report("worker/0", [report(step, 0, loss=1.0 + step)])
        reporter.report("worker/1", [report(step, 1, loss=3.0 + step, staleness=2)])
    reporter.evaluation(2, {"accuracy": 0.5})
    reporter.rates(4, {"ps/0": (100, 200)}, 10.0)
    assert curve(reporter, "loss") == [(0, 2.0), (1, 3.0), (2, 4.0), (3, 5.0)]
    assert curve(reporter, "staleness")[0] == (0, 1.0)
    assert curve(reporter, "evaluation/accuracy") == [(2, 0.5)]
    assert len(curve(reporter, "push")) == len(curve(reporter, "steps")) == 1
    reporter.begin(replicas=2, joined=True, timeline=6, first_step=2)
    assert [x for x, _ in curve(reporter, "loss")] == [0, 1, 2]
    assert curve(reporter, "evaluation/accuracy") == [(2, 0.5)]
    reporter.close()


def test_a_run_that_goes_on_from_a_checkpoint_has_not_trained_up_to_it_in_a_moment(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    for now_s, step in ((0.0, 0), (1.0, 0), (2.0, 400)):
        reporter.rates(step, {}, now_s)
        assert reporter.step_rate.per_second == 0.0
    reporter.begin(replicas=1, joined=True, timeline=2, first_step=400)
    for second in range(3):
        reporter.rates(400 + 7 * second, {}, 3.0 + second)
    assert reporter.step_rate.per_second == pytest.approx(7.0)
    # Back to it once more, and on from there.
    reporter.begin(replicas=1, joined=True, timeline=3, first_step=400)
    reporter.rates(400, {}, 6.0)
    assert reporter.step_rate.per_second == 0.0
    reporter.close()


def test_the_status_of_a_run_says_who_is_there_how_fast_and_where_the_shards_are(tmp_path: Path) -> None:
    cluster = running()
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=2, joined=True, timeline=1, first_step=0)
    for second in range(3):
        reporter.report("worker/0", [report(second, 0, data_s=0.3, compute_s=0.1, exchange_s=0.2, staleness=1)])
        reporter.rates(second, {"worker/0": (second * 10, 0), "ps/0": (second * 10, 0)}, second)
    cluster.advance(5)
    status = overview(cluster.program, reporter, tmp_path, cluster.now_s, page="http://127.0.0.1:1/")
    view = cluster_view(status)
    worker = next(task for task in view.tasks if task.name == "worker/0")
    assert (worker.push_bytes_per_s, worker.steps_per_s) == (10.0, 1.0)
    assert (worker.data_s, worker.compute_s, worker.exchange_s) == pytest.approx((0.3, 0.1, 0.2))
    assert (view.step, view.push_bytes_per_s, view.pull_bytes_per_s) == (5, 10.0, 0.0)
    assert {shard.ps for shard in view.shards} == {ps.task for ps in cluster.ps}
    assert status.page == "http://127.0.0.1:1/"
    assert status.missing == ()
    reporter.close()


def test_tasks_that_never_joined_are_named_in_the_status(tmp_path: Path) -> None:
    cluster = Cluster(job=make_job())
    cluster.join("ps", 0)
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    status = overview(cluster.program, reporter, tmp_path, cluster.now_s)
    assert "ps/0" not in status.missing
    assert "worker/0" in status.missing
    assert cluster_view(status).doing.startswith("waiting for ")
    reporter.close()


# The flag


@pytest.mark.parametrize(
    ("text", "no_page", "expected"),
    [
        ("127.0.0.1:0", False, "127.0.0.1:0"),
        ("0.0.0.0:8400", False, "0.0.0.0:8400"),
        ("0.0.0.0:8400", True, None),
        ("off", False, None),
    ],
)
def test_the_page_has_an_address_or_is_off(text: str, no_page: bool, expected: str | None) -> None:
    assert options.page_address({"page": text, "no_page": no_page}) == expected


def test_a_page_at_no_address_is_refused_before_anything_starts() -> None:
    with pytest.raises(ClusterSpecError, match="--page is '8400'"):
        options.page_address({"page": "8400", "no_page": False})
