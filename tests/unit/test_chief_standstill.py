"""A job that stands still: when it does, since when, and whom it waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.core.orders import StepReport
from shardline.observability.metrics import Metrics
from shardline.observability.view import cluster_view
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.summary import overview
from shardline_chief.rules.standstill import FIRST_S, STILL_S, TIMES, Motion
from tests.support.chief_cluster import Cluster, T, running


def stepping(every_s: float, steps: int = 10) -> Motion:
    """A job that made its steps at an even pace, the last one at steps * every_s."""
    motion = Motion()
    for step in range(steps + 1):
        motion.note(step, step * every_s)
    return motion


def awaited(cluster: Cluster) -> dict[str, str]:
    found = cluster.program.standstill(cluster.now_s)
    return {one.task: one.why for one in found.awaited} if found is not None else {}


def trained(cluster: Cluster, steps: int = 5) -> Cluster:
    """The cluster after some even steps, a second apart."""
    for step in range(1, steps + 1):
        for ps in cluster.ps:
            ps.advance(step)
        cluster.tick(1.0)
    assert cluster.program.standstill(cluster.now_s) is None
    return cluster


# When


@pytest.mark.parametrize(
    ("every_s", "after_s"), [(0.02, STILL_S), (1.0, STILL_S), (10.0, TIMES * 10.0), (100.0, TIMES * 100.0)]
)
def test_a_job_stands_still_after_a_few_usual_steps_and_a_few_seconds(every_s: float, after_s: float) -> None:
    motion, last_s = stepping(every_s), 10 * every_s
    assert motion.still_s(last_s + 0.99 * after_s) is None
    assert motion.still_s(last_s + 1.01 * after_s) == pytest.approx(1.01 * after_s)


def test_before_its_first_step_a_job_gets_more_time_and_before_it_trains_it_does_not_stand_still() -> None:
    motion = Motion()
    assert motion.still_s(1e6) is None
    motion.note("begun", 100.0)
    assert motion.still_s(100.0 + FIRST_S - 1.0) is None
    assert motion.still_s(100.0 + FIRST_S) == FIRST_S


def test_a_job_whose_tasks_report_rarely_is_given_the_time_of_some_reports() -> None:
    motion = Motion(told_s=60.0)
    motion.note("begun", 0.0)
    assert motion.still_s(179.0) is None
    assert motion.still_s(180.0) == 180.0


def test_one_long_pause_does_not_make_the_next_one_usual() -> None:
    motion = stepping(1.0)
    motion.note("after an evaluation", 500.0)
    assert motion.moved_s == 500.0
    assert motion.still_s(500.0 + STILL_S) == STILL_S


def test_a_standstill_ends_with_the_next_step() -> None:
    cluster = trained(running())
    cluster.tick(2 * STILL_S)
    assert awaited(cluster)
    cluster.advance(6)
    assert cluster.program.standstill(cluster.now_s) is None


def test_a_job_that_waits_for_its_tasks_at_the_start_does_not_stand_still() -> None:
    cluster = Cluster()
    cluster.tick(100.0)
    assert cluster.program.standstill(cluster.now_s) is None


def test_a_job_that_has_ended_does_not_stand_still() -> None:
    cluster = trained(running())
    cluster.program.fatal(1, "enough", cluster.now_s)
    cluster.tick(100.0)
    assert cluster.program.standstill(cluster.now_s) is None


# For whom


def test_a_worker_that_is_silent_is_awaited_by_name_with_its_replicas() -> None:
    cluster = trained(running())
    for ps in cluster.ps:
        ps.waiting_for = (2, 3)
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.tick(10.0, silent=("worker/1",))
    assert awaited(cluster) == {"worker/1": "replica 2, 3, last at step 0, last heard 10 s ago"}
    found = cluster.program.standstill(cluster.now_s)
    assert found is not None and found.seconds == pytest.approx(10.0, abs=1.0)


def test_a_living_worker_whose_gradients_are_missing_is_awaited_and_the_others_are_not() -> None:
    cluster = trained(running())
    for ps in cluster.ps:
        ps.waiting_for = (0,)
    cluster.tick(10.0)
    assert awaited(cluster) == {"worker/0": "replica 0, last at step 0, alive"}


def test_where_no_replica_is_known_to_be_missing_every_worker_is_awaited() -> None:
    cluster = trained(running())
    cluster.tick(10.0)
    assert list(awaited(cluster)) == ["worker/0", "worker/1"]


def test_a_silent_server_is_awaited_and_not_the_workers_that_wait_for_it() -> None:
    cluster = trained(running())
    for ps in cluster.ps:
        ps.waiting_for = (0, 1, 2, 3)
    cluster.tick(10.0, silent=("ps/1",))
    assert awaited(cluster) == {"ps/1": "last heard 10 s ago"}


def test_a_server_that_a_worker_can_not_reach_is_awaited() -> None:
    cluster = trained(running())
    cluster.suspects["worker/0"] = ("ps/1",)
    cluster.tick(STILL_S + 1.0)
    assert awaited(cluster) == {"ps/1": "it does not answer worker/0"}


def test_a_lost_server_is_awaited_until_training_goes_on() -> None:
    cluster = trained(running())
    cluster.kill_ps(1)
    cluster.tick(T / 3 + 4.0)
    assert cluster.program.state.losses.now is not None
    assert awaited(cluster) == {"ps/1": "dead, last heard 24 s ago"}


def test_a_paused_job_awaits_the_workers_that_it_lacks() -> None:
    cluster = Cluster(min_workers=2, job=running().program.state.job)
    cluster.start()
    trained(cluster)
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.tick(T / 3 + 4.0, silent=("worker/1",))
    assert awaited(cluster) == {"worker/1": "dead, last heard 24 s ago"}


def test_a_lost_server_whose_shards_others_have_is_not_awaited() -> None:
    cluster = Cluster(min_workers=2, job=running().program.state.job)
    cluster.start()
    trained(cluster)
    cluster.kill_ps(1)
    cluster.tick(2 * T)
    trained(cluster)
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.tick(T / 3 + 4.0, silent=("worker/1",))
    assert list(awaited(cluster)) == ["worker/1"]


def test_without_its_own_pushes_an_asynchronous_job_awaits_its_workers() -> None:
    cluster = trained(running(mode="async"))
    cluster.tick(10.0)
    assert list(awaited(cluster)) == ["worker/0", "worker/1"]


# In the status


def test_while_nothing_moves_the_status_has_no_rates_and_no_time_left(tmp_path: Path) -> None:
    cluster = running()
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"))
    reporter.begin(replicas=1, joined=True, timeline=1, first_step=0)

    def rates() -> None:
        moved = cluster.program.state.progress.step
        reporter.rates(moved, {"worker/0": (moved, moved), "ps/0": (moved, moved)}, cluster.now_s)

    for step in range(1, 9):
        for ps in cluster.ps:
            ps.advance(step)
        cluster.tick(1.0)
        reporter.report("worker/0", [StepReport(step=step - 1, replica=0, samples=8, loss=1.0)])
        rates()
    view = cluster_view(overview(cluster.program, reporter, tmp_path, cluster.now_s))
    assert (view.standstill, view.doing) == (None, "training")
    assert (view.steps_per_s, view.push_bytes_per_s, view.left_s) == pytest.approx((1.0, 1.0, 92.0), rel=0.2)
    for _ in range(20):
        cluster.tick(0.5, silent=("worker/1",))
        rates()
    view = cluster_view(overview(cluster.program, reporter, tmp_path, cluster.now_s))
    assert view.standstill is not None
    assert view.standstill.since == pytest.approx(view.time - 10.0, abs=1.0)
    assert (view.standstill.whom, view.doing) == ("worker/1", "standing still for 10 s, waiting for worker/1")
    assert view.standstill.facts == "worker/1 (last at step 0, last heard 10 s ago)"
    assert (view.steps_per_s, view.push_bytes_per_s, view.pull_bytes_per_s, view.left_s) == (0.0, 0.0, 0.0, None)
    assert {(task.steps_per_s, task.push_bytes_per_s) for task in view.tasks} == {(0.0, 0.0)}
    reporter.close()
