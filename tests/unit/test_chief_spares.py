"""Whose word on losses and figures counts: who trains, on what it was given."""

from __future__ import annotations

from shardline.core.orders import StepReport
from shardline_chief.rules.messages import Beat
from tests.support.chief_cluster import Cluster, make_job

FIGURES = {"lost_updates": 7.0}


def told(cluster: Cluster, task: str, *reports: tuple[int, int]) -> list[tuple[int, int]]:
    """What is taken of reports of these (step, replica)."""
    steps = tuple(StepReport(step=step, replica=replica, loss=1.0, samples=1) for step, replica in reports)
    beat = Beat(task=task, incarnation=cluster.lives[task], steps=steps, figures=FIGURES)
    assert cluster.program.beat(beat, cluster.now_s)
    cluster.settle()
    return [(report.step, report.replica) for report in cluster.program.heartbeats.reported(beat)]


def test_steps_count_for_the_replicas_of_who_tells_them() -> None:
    cluster = Cluster(job=make_job(replicas=2), workers=2)
    cluster.start(workers=2)
    cluster.join("worker", 2)
    assert told(cluster, "worker/0", (5, 0), (5, 1)) == [(5, 0)]
    assert told(cluster, "worker/2", (5, 0), (5, 1)) == []
    assert cluster.program.state.figures.total("lost_updates") == 7
    stranger = Beat(task="worker/1", incarnation=1, steps=(StepReport(step=5, replica=1, loss=0.0, samples=1),))
    assert cluster.program.heartbeats.reported(stranger) == ()


def test_the_last_steps_of_a_replica_that_has_moved_still_count() -> None:
    cluster = Cluster(job=make_job(replicas=2), workers=2)
    cluster.start(workers=1)
    cluster.tick(60)
    assert cluster.orders("worker/0").replicas == (0, 1)
    cluster.join("worker", 1)
    (moved,) = cluster.orders("worker/1").replicas
    assert told(cluster, "worker/0", (5, 0), (5, 1)) == [(5, 0), (5, 1)]
    assert told(cluster, "worker/1", (6, moved), (6, 1 - moved)) == [(6, moved)]
    # What a life had, the next one of the same name has not.
    cluster.program.stream_broken("worker/1", cluster.lives["worker/1"], cluster.now_s)
    cluster.join("worker", 1)
    assert told(cluster, "worker/1", (6, 1 - moved)) == []


def test_asynchronous_steps_count_for_the_batches_that_were_leased() -> None:
    cluster = Cluster(job=make_job(mode="async"), workers=2)
    cluster.start(workers=2)
    cluster.join("worker", 2)
    first = cluster.program.lease("worker/0", cluster.lives["worker/0"], (), cluster.now_s)
    second = cluster.program.lease("worker/1", cluster.lives["worker/1"], (), cluster.now_s)
    assert first.count and second.first == first.count
    own, others = (first.first, 0), (second.first, 0)
    assert told(cluster, "worker/0", own, others) == [own]
    # Told with a beat, when the lease is done already.
    cluster.program.lease("worker/0", cluster.lives["worker/0"], (first.lease,), cluster.now_s)
    assert told(cluster, "worker/0", own, others) == [own]
    assert told(cluster, "worker/2", own, others, (99, 0)) == []
    assert cluster.program.state.figures.total("lost_updates") == 7


def test_an_asynchronous_script_chooses_its_batches() -> None:
    cluster = Cluster(job=make_job(mode="async", script=True), workers=2)
    cluster.start(workers=2)
    assert told(cluster, "worker/0", (5, 0)) == [(5, 0)]
