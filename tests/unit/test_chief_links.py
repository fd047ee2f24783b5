"""Links between those that the chief hears: who alone is cut off is fenced, whom most miss is lost."""

from __future__ import annotations

from shardline.core.orders import Phase
from tests.support.chief_cluster import Cluster, T, make_job, phase


def test_worker_that_alone_does_not_hear_a_server_is_fenced_and_its_replicas_move() -> None:
    cluster = Cluster(job=make_job(), workers=3)
    cluster.start(workers=3)
    cluster.suspects["worker/1"] = ("ps/0",)
    cluster.tick(1)
    assert not cluster.orders("worker/1").fenced
    cluster.tick(T / 10 + 2)
    assert cluster.orders("worker/1").fenced
    assert "worker/1 got no answer from ps/0 at h:1 for 20 s, but the others did; replica" in cluster.text()
    assert cluster.program.state.losses.recoveries == []
    assert sorted([*cluster.orders("worker/0").replicas, *cluster.orders("worker/2").replicas]) == [0, 1, 2, 3]


def test_server_that_most_do_not_hear_is_lost_although_it_beats() -> None:
    cluster = Cluster(job=make_job(), workers=3)
    cluster.start(workers=3)
    cluster.suspects["worker/0"] = ("ps/1",)
    cluster.tick(1)
    cluster.suspects["worker/2"] = ("ps/1",)
    cluster.tick(T / 10 + 2)
    assert phase(cluster) is Phase.INIT
    assert cluster.orders("ps/1").fenced
    assert "worker/0, worker/2 got no answer from ps/1 at h:1 for 20 s (most of the tasks that train)" in cluster.text()
    cluster.suspects.clear()
    cluster.restart_ps(1)
    cluster.tick()
    assert phase(cluster) is Phase.RUNNING


def test_spares_have_no_say_in_which_server_is_lost() -> None:
    """They exchange nothing with servers, and whoever may join as a worker can be many of them."""
    cluster = Cluster(job=make_job(replicas=2), workers=2)
    cluster.start(workers=2)
    for index in (2, 3, 4):
        cluster.join("worker", index)
        assert cluster.orders(f"worker/{index}").replicas == ()
        cluster.suspects[f"worker/{index}"] = ("ps/0",)
    cluster.tick(T / 5)
    assert phase(cluster) is Phase.RUNNING
    assert not cluster.orders("ps/0").fenced
    # Nor do they keep one that those who train do not hear.
    for index in (0, 1):
        cluster.suspects[f"worker/{index}"] = ("ps/1",)
    cluster.tick(T / 10 + 2)
    assert "worker/0, worker/1 got no answer from ps/1 at h:1 for 20 s (most of the tasks that train)" in cluster.text()


def test_asynchronous_workers_without_a_lease_have_no_say_in_which_server_is_lost() -> None:
    cluster = Cluster(job=make_job(mode="async"), workers=2)
    cluster.start(workers=2)
    for index in (0, 1):
        task = f"worker/{index}"
        cluster.program.lease(task, cluster.lives[task], (), cluster.now_s)
    for index in (2, 3, 4):
        cluster.join("worker", index)
        cluster.suspects[f"worker/{index}"] = ("ps/0",)
    cluster.tick(T / 5)
    assert phase(cluster) is Phase.RUNNING
    assert not cluster.orders("ps/0").fenced
    for index in (0, 1):
        cluster.suspects[f"worker/{index}"] = ("ps/1",)
    cluster.tick(T / 10 + 2)
    assert "worker/0, worker/1 got no answer from ps/1 at h:1 for 20 s (most of the tasks that train)" in cluster.text()


def test_server_that_is_heard_again_is_left_alone() -> None:
    cluster = Cluster(job=make_job(), workers=3)
    cluster.start(workers=3)
    cluster.suspects["worker/1"] = ("ps/0",)
    cluster.tick(T / 10 - 2)
    cluster.suspects.clear()
    cluster.tick(T / 10)
    assert not cluster.orders("worker/1").fenced
    assert phase(cluster) is Phase.RUNNING
