"""Fewer workers than were asked for: the job waits for others and says for whom."""

from __future__ import annotations

from tests.support.chief_cluster import Cluster, T, make_job


def test_with_fewer_workers_than_wanted_nothing_moves_and_the_wait_names_who_is_missing() -> None:
    cluster = Cluster(job=make_job(), min_workers=2)
    cluster.start()
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    assert cluster.orders("worker/0").replicas == (0, 1)
    assert "1 of at least 2 tasks that train are left: waiting 60 s for a task to join" in cluster.text()
    cluster.join("worker", 1)
    assert cluster.orders("worker/1").replicas == (2, 3)
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.tick(T + 4, silent=("worker/1",))
    assert cluster.finish is not None
    assert "worker/1 (1 of at least 2 train) is gone and no replacement joined within 60 s" in cluster.finish.reason


def test_asynchronous_job_with_fewer_workers_than_wanted_hands_out_nothing() -> None:
    cluster = Cluster(job=make_job(mode="async"), min_workers=2)
    cluster.start()
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    answer = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    assert answer.outcome == "WAITING"
