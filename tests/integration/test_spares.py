"""Spares on real servers: the first N make a step, the late are dropped and go on, and the bits follow the choices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardline.client.exchange.shard_exchange import Overtaken
from shardline.core.choices import Choices, members
from shardline.core.outcome import Outcome
from shardline.job import Job
from shardline.lanes.base import Lane
from shardline.rpc.messages.configuration import Configuration
from shardline.testing import ReferenceResult, reference
from shardline.waist import Exchanged, Push, Sender, Sink, Standing, Want
from tests.support.cluster import Cluster, Worker, assert_same_end, split_evenly
from tests.support.covering import covering
from tests.support.jobs import Rich, make_job
from tests.support.overlap import OverlapWorker
from tests.support.standbys import Protected
from tests.support.waiting import wait_for

SMALL_BUCKETS = 512


def spare_job(**changes: Any) -> Job:
    return make_job("adam", **{"model": Rich, "steps": 6, "replicas": 4, "consistency": "sync:spares=1", **changes})


class LateLane(Lane):
    """A lane whose pushes leave when the others are `behind` steps ahead, as long as they train."""

    name = "late"

    def __init__(self, lane: Lane, cluster: Cluster, behind: int) -> None:
        self._lane, self._cluster, self._behind = lane, cluster, behind
        self.answers: list[Outcome] = []

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        for push in contributions:
            target = min(push.step + self._behind, self._cluster.job.steps)
            wait_for(functools.partial(self._reached, target), f"step {target} of the others")
        done = self._lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)
        self.answers += [ack.outcome for ack in done.acks]
        return done

    def _reached(self, step: int) -> bool:
        return min(shard.step_min for shard in self._cluster.shards) >= step

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        return self._lane.standing(sender, replicas, timeout_s=timeout_s)

    def allocate(self, bucket: int, nbytes: int) -> memoryview | None:
        return self._lane.allocate(bucket, nbytes)

    @property
    def by_reference(self) -> bool:
        return self._lane.by_reference

    def cancel(self) -> None:
        self._lane.cancel()

    def close(self) -> None:
        self._lane.close()


def persist(worker: Worker, replicas: Sequence[int], steps: int) -> Worker:
    """Train as a session does: a worker that is left behind asks for the step again."""
    while worker.trainer.step < steps:
        try:
            worker.run(replicas, steps)
        except Overtaken:
            continue
    return worker


def train(
    cluster: Cluster, ownership: Sequence[Sequence[int]], *, late: Collection[int], behind: int
) -> list[LateLane]:
    """Train to the end, the workers in `late` behind the others; returns their lanes."""
    lanes: list[LateLane] = []

    def wrap(lane: Lane) -> Lane:
        lanes.append(LateLane(lane, cluster, behind))
        return lanes[-1]

    workers = [
        cluster.worker(index, wrap=wrap) if index in late else cluster.worker(index) for index in range(len(ownership))
    ]
    ends = [
        functools.partial(persist, worker, owned, cluster.job.steps)
        for worker, owned in zip(workers, ownership, strict=True)
    ]
    cluster.together(ends)
    return lanes


def choices(cluster: Cluster) -> Choices:
    known = cluster.shards[0].mode.choices
    assert known is not None
    return known.made()


def made(cluster: Cluster) -> list[tuple[int, ...]]:
    """The chosen replicas of each step, from the lead."""
    found = choices(cluster)
    assert found.first == 0
    return [members(choice) for choice in found.made]


def expected_end(cluster: Cluster) -> ReferenceResult:
    return reference(cluster.job, choices=made(cluster))


@pytest.mark.parametrize(("lane", "behind"), covering(["grpc", "tcp", "shm"], [1, 4]))
def test_the_late_are_told_and_go_on_while_the_others_train(lane: str, behind: int) -> None:
    with Cluster(spare_job(steps=8), ps=2, bucket_bytes=SMALL_BUCKETS, lane=lane) as cluster:
        lanes = train(cluster, [[0], [1], [2], [3]], late=[2], behind=behind)
        assert_same_end(cluster.state(), expected_end(cluster))
        assert made(cluster) == [(0, 1, 3)] * 8
        assert {*itertools.chain(*(lane.answers for lane in lanes))} == {Outcome.LATE_DROPPED}
        assert not any(shard.partial_bytes for shard in cluster.shards)
        assert not cluster.fallbacks


@pytest.mark.parametrize(
    ("changes", "workers"),
    covering(
        [{}, {"clip_norm": 0.05}, {"consistency": "sync:quorum=0.5"}, {"replicas": 6}, {"accumulate": 2}],
        [4, 2],
    ),
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else None,
)
def test_whoever_is_first_the_end_follows_from_the_choices(changes: dict[str, Any], workers: int) -> None:
    job = spare_job(**changes)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        owned = split_evenly(job.replicas, workers)
        train(cluster, owned, late=[], behind=0)
        needed = {4: 3, 6: 5}[job.replicas] if "consistency" not in changes else 2
        assert [len(choice) for choice in made(cluster)] == [needed] * job.steps
        assert_same_end(cluster.state(), expected_end(cluster))
        assert [shard.tally.duplicate_mismatches for shard in cluster.shards] == [0, 0]


class Replaying(Cluster):
    """A cluster whose lead repeats choices."""

    def __init__(self, job: Job, replayed: Sequence[int], **options: Any) -> None:
        self._replayed = Choices(0, tuple(replayed))
        super().__init__(job, **options)

    def configuration(self, host: int) -> Configuration:
        return replace(super().configuration(host), replayed=self._replayed)


def test_a_replay_has_the_same_bits_whoever_is_late_this_time() -> None:
    job = spare_job()
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        train(cluster, [[0], [1], [2], [3]], late=[3], behind=2)
        repeated, end = choices(cluster).made, cluster.state()
    with Replaying(job, repeated, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        train(cluster, [[1], [0, 2], [3]], late=[], behind=0)
        assert choices(cluster).made == repeated
        assert_same_end(cluster.state(), reference(job, choices=[members(choice) for choice in repeated]))
        assert (end.step, end.version) == (cluster.state().step, cluster.state().version)


@pytest.mark.parametrize(("lost", "zombie"), [(0, False), (0, True), (1, False)])
def test_a_standby_of_the_lead_keeps_its_choices(lost: int, zombie: bool) -> None:
    with Protected(spare_job(steps=8), ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.await_synced()

        def lose() -> None:
            cluster.fail_over(lost, zombie=zombie)

        def trainer(index: int, owned: Sequence[int]) -> Callable[[], Any]:
            return lambda: cluster.persist(index, lambda worker: persist(worker, owned, cluster.job.steps))

        cluster.together([*(trainer(index, [index]) for index in range(4)), cluster.at_step(3, lost, lose)])
        assert cluster.timeline > 1 << 32 | 1
        assert_same_end(cluster.state(), expected_end(cluster))


def test_gradients_that_leave_early_bring_the_workers_own_learning_rate() -> None:
    job = make_job("sgd", replicas=3, steps=5, consistency="sync:spares=1")
    with Cluster(job) as cluster:
        # Replica 0 never comes.
        workers = [OverlapWorker(cluster, replica, per_layer=False) for replica in (1, 2)]
        cluster.workers.extend(workers)
        for worker in workers:
            worker.hyper = {0: {"lr": 0.001}}
        runs = [functools.partial(worker.run, [worker.index], job.steps) for worker in workers]
        cluster.together(runs)
        assert all(worker.early_steps == job.steps - 1 for worker in workers)
        slow = replace(job, optimizer_args={"lr": 0.001})
        assert_same_end(cluster.state(), reference(slow, choices=[(1, 2)] * job.steps))
