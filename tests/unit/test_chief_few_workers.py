"""Fewer workers than were asked for: the job waits for others and says for whom."""

from __future__ import annotations

from dataclasses import replace

from shardline.core.spec import TensorSpec, parts_of
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


def shared() -> Cluster:
    """Layers that two workers share."""
    parts = parts_of(TensorSpec(name="weight", shape=(64, 4), dtype="float32"), 0, 2)
    tensors = tuple(replace(part, fragment=1 + part.part) for part in parts)
    return Cluster(job=make_job(tensors=(TensorSpec(name="bias", shape=(64,), dtype="float32"), *tensors)))


def test_workers_that_are_to_share_layers_and_are_on_several_hosts_are_refused_before_training() -> None:
    cluster = shared()
    for ps in cluster.ps:
        cluster.join("ps", ps.number)
    for index in range(2):
        cluster.join("worker", index, address=f"host{index}:1")
    cluster.initialize()
    assert cluster.finish is not None and cluster.finish.exit_code == 2
    assert (
        "shares layers among 2 workers of one host, but no host has as many: worker/0 at host0:1, worker/1 at host1:1; "
        "start 2 on one host, or choose another tensor_ranks" in cluster.finish.reason
    )


def test_a_job_whose_last_team_is_split_up_waits_for_another_worker_of_its_host_and_then_ends() -> None:
    cluster = shared()
    cluster.start()
    cluster.tick(T / 3 + 2, silent=("worker/1",))
    cluster.join("worker", 1, address="elsewhere:1")
    assert not cluster.orders("worker/0").posts and cluster.finish is None
    cluster.tick(T + 4)
    cluster.tick(T + 4)
    assert cluster.finish is not None
    assert "a team of 2 workers of one host, which share layers, is gone and no replacement" in cluster.finish.reason
