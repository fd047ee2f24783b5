"""Workers that die in mid-push, lives that are fenced, histories that end: the bits stay those of the reference."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from shardline.client.api.workplace import WorkerState
from shardline.client.exchange.shard_exchange import Interrupted, Restart, ShardTask, Stopped
from shardline.errors import ProtocolError
from shardline.job import Job
from shardline.lanes.base import Lane
from shardline.testing import ReferenceResult, reference
from shardline.waist import Exchanged, Payload, Payloads, Push, Sender, Sink, Standing, Want
from shardline_pipeline.model import Pipeline
from tests.support.cluster import PATIENCE_S, Cluster, Worker, assert_same_end
from tests.support.covering import covering
from tests.support.jobs import Rich, make_job
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("no_push_is_small")
SMALL_BUCKETS = 512


class WorkerDied(Exception):
    """Stands for the end of a process."""


class Between:
    """A push's payloads; calls a function before the one at `at`, when those before have left."""

    def __init__(self, payloads: Payloads, at: int, function: Callable[[], None]) -> None:
        self._payloads, self._at, self._function = payloads, at, function

    @property
    def nbytes(self) -> int:
        return self._payloads.nbytes

    @property
    def empty(self) -> Sequence[int]:
        return self._payloads.empty

    def batches(self) -> Iterator[Sequence[Payload]]:
        number = 0
        for batch in self._payloads.batches():
            for bucket in batch:
                if number == self._at:
                    self._function()
                yield [bucket]
                number += 1
        if self._at >= number:
            self._function()


class TrapLane(Lane):
    """A lane that calls a function in the middle of one push: before bucket `at` of the first push of `step`."""

    name = "trap"

    def __init__(self, lane: Lane, *, step: int, at: int, function: Callable[[], None]) -> None:
        self._lane, self._step, self._at, self._function = lane, step, at, function
        self.sprung = False

    def exchange(
        self, sender: Sender, contributions: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        if contributions and contributions[0].step == self._step and not self.sprung:
            self.sprung = True
            first, *rest = contributions
            contributions = [replace(first, payloads=Between(first.payloads, self._at, self._function)), *rest]
        return self._lane.exchange(sender, contributions, want, sink, timeout_s=timeout_s)

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        return self._lane.standing(sender, replicas, timeout_s=timeout_s)

    def cancel(self) -> None:
        self._lane.cancel()

    def close(self) -> None:
        self._lane.close()


def trap_one_shard(shard: int, *, step: int, at: int, function: Callable[[], None]) -> Callable[[Lane], Lane]:
    """Lanes are wrapped in the order of shards; only one gets the trap."""
    count = iter(range(100))

    def wrap(lane: Lane) -> Lane:
        return TrapLane(lane, step=step, at=at, function=function) if next(count) == shard else lane

    return wrap


def counted(cluster: Cluster, shard: int, replica: int) -> int:
    """Buckets of a shard in which the replica counts in the open step."""
    return sum(replica in bucket.contributions.counted for bucket in cluster.shards[shard].buckets)


def received(cluster: Cluster, shard: int, replica: int, step: int) -> int:
    """Buckets of a shard that have the replica's contribution to a step."""
    return sum(
        bucket.step > step or replica in bucket.contributions.counted for bucket in cluster.shards[shard].buckets
    )


@functools.cache
def expected_end(clip_norm: float) -> ReferenceResult:
    return reference(death_job(clip_norm))


def death_job(clip_norm: float = 0.0) -> Job:
    return make_job("adam", model=Rich, steps=5, clip_norm=clip_norm)


PLACES = [(0, 0, 0), (0, 1, 2), (2, 0, 1), (2, 1, 1), (4, 0, 3)]


@pytest.mark.parametrize(("clip_norm", "place"), covering([0.0, 0.05], PLACES))
def test_a_worker_that_dies_between_buckets_is_replaced_and_the_bits_stay(
    place: tuple[int, int, int], clip_norm: float
) -> None:
    step, shard, at = place
    job = death_job(clip_norm)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS, members={"worker/0": 1, "worker/1": 1}) as cluster:

        def die() -> None:
            # Those before the trap are counted; what is still under way when the stream breaks may be lost.
            wait_for(lambda: received(cluster, shard, 1, step) >= at - 1, "the first buckets to be counted")
            raise WorkerDied

        doomed = cluster.worker(1, wrap=trap_one_shard(shard, step=step, at=at, function=die))
        survivor = cluster.worker(0)

        def live_and_die() -> None:
            with pytest.raises((WorkerDied, Interrupted)):
                doomed.run([1], job.steps)
            doomed.close()
            for control in cluster.controls:
                control.set_membership(cluster.timeline, {"worker/0": 1, "worker/1": 2})
            cluster.worker(1, incarnation=2).run([1], job.steps)

        cluster.together([lambda: survivor.run([0, 2], job.steps), live_and_die])
        assert_same_end(cluster.state(), expected_end(clip_norm))
        assert [shard.tally.duplicate_mismatches for shard in cluster.shards] == [0, 0]


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
def test_another_worker_takes_over_the_replicas_of_a_dead_one_in_mid_step(clip_norm: float) -> None:
    job = death_job(clip_norm)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        died = threading.Event()

        def die() -> None:
            died.set()
            raise WorkerDied

        # A block of replicas that was summed beforehand is counted on one shard and not on the other.
        doomed = cluster.worker(1, wrap=trap_one_shard(1, step=3, at=1, function=die))
        survivor = cluster.worker(0)

        def survive() -> None:
            todo = survivor.trainer.locate([2], cluster.timeline)
            while survivor.trainer.step < 3:
                survivor.step(sorted(todo))
            assert died.wait(PATIENCE_S)
            survivor.run([0, 1, 2], job.steps)

        def live_and_die() -> None:
            with pytest.raises((WorkerDied, Interrupted)):
                doomed.run([0, 1], job.steps)

        cluster.together([survive, live_and_die])
        assert_same_end(cluster.state(), expected_end(clip_norm))


def test_workers_with_stages_compute_the_step_that_some_replica_lacks_and_all_they_have_of_it() -> None:
    layers = [nn.Linear(5, 4), nn.Linear(4, 1)]
    job = make_job("sgd", model=lambda: Pipeline(layers, stages=[1]), replicas=2, pipeline="flush")
    with Cluster(job) as cluster:
        # Units are stage * 2 + replica. All of replica 1's step 0 counts, and nothing of replica 0's.
        quick = cluster.worker(1)
        quick.trainer.locate([1, 3], cluster.timeline)
        quick.tick([1])
        quick.trainer.send()
        (shard,) = cluster.shards
        wait_for(lambda: shard.mode.progress(1) == 1, "both stages of replica 1 to be counted")
        for units, own in (([0, 1], {0, 1}), ([3], {1}), ([0, 1, 2], {0, 1})):
            found = cluster.worker(0)
            assert found.trainer.locate(units, cluster.timeline) == own
            assert found.trainer.step == 0
        waits = SimpleNamespace(place=SimpleNamespace(trainer=found.trainer), still_ordered=lambda: True)
        assert WorkerState.still_open(cast(WorkerState, waits), 0)
        found.step([0])
        quick.settle()
        assert not WorkerState.still_open(cast(WorkerState, waits), 0)


def test_a_late_push_of_a_fenced_life_changes_nothing() -> None:
    job = death_job()
    with Cluster(job, ps=2, members={"worker/0": 1}) as cluster:
        old = cluster.worker(0, incarnation=1).run([0, 1, 2], 2)
        for control in cluster.controls:
            assert control.set_membership(cluster.timeline, {"worker/0": 2}) == 1
        before = cluster.state()
        with pytest.raises(Restart, match="fenced: worker/0 incarnation 0x1 is not admitted, 0x2 is"):
            old.step([0, 1, 2])
        assert [counted(cluster, shard, 0) for shard in range(2)] == [0, 0]
        assert cluster.state().step == before.step == 2
        cluster.worker(0, incarnation=2).run([0, 1, 2], job.steps)
        assert_same_end(cluster.state(), expected_end(0.0))


def test_a_push_that_is_under_way_when_its_life_is_fenced_counts_no_further() -> None:
    job = make_job("adam", model=Rich, replicas=1)
    with Cluster(job, bucket_bytes=SMALL_BUCKETS, members={"worker/0": 1}) as cluster:

        def fence() -> None:
            wait_for(lambda: cluster.shards[0].step_max == 1, "the first bucket")
            cluster.controls[0].set_membership(cluster.timeline, {"worker/0": 2})

        old = cluster.worker(0, incarnation=1, wrap=trap_one_shard(0, step=0, at=3, function=fence))
        with pytest.raises(Restart, match="fenced"):
            old.run([0], 1)
        steps = [bucket.step for bucket in cluster.shards[0].buckets]
        assert min(steps) == 0 and max(steps) == 1, steps
        cluster.worker(0, incarnation=2).run([0], job.steps)
        assert_same_end(cluster.state(), reference(job))


def test_an_asynchronous_push_that_is_under_way_when_its_life_is_fenced_is_not_applied() -> None:
    job = make_job("sgd", consistency="async")
    with Cluster(job, bucket_bytes=SMALL_BUCKETS, members={"worker/0": 1}) as cluster:

        def fence() -> None:
            cluster.controls[0].set_membership(cluster.timeline, {"worker/0": 2})

        old = cluster.worker(0, incarnation=1, wrap=trap_one_shard(0, step=0, at=1, function=fence))
        before = cluster.state().params
        with pytest.raises(Restart, match="fenced"):
            old.run_async([0])
        assert cluster.shards[0].version == 0
        assert all(torch.equal(value, before[name]) for name, value in cluster.state().params.items())


def test_a_push_or_pull_of_another_timeline_is_refused_by_name() -> None:
    job = death_job()
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0).run([0, 1, 2], 1)
        before, timeline = cluster.state(), cluster.timeline + 1
        for host, control in enumerate(cluster.controls):
            control.configure(replace(cluster.configuration(host), timeline=timeline, keep=(host,)))
        with pytest.raises(Restart, match="wrong_timeline: the timeline is 0x100000002; the message says 0x100000001"):
            worker.step([0, 1, 2])
        worker.trainer.exchange.arm()
        with pytest.raises(Restart, match="wrong_timeline"):
            worker.trainer.locate([0], cluster.timeline)
        with pytest.raises(Restart, match="being prepared"):
            worker.trainer.locate([0], timeline)
        assert cluster.state().step == before.step == 1


def cut_of(cluster: Cluster, step: int) -> list[list]:  # type: ignore[type-arg]
    return [
        list(control.get_cut(cluster.timeline, shard, step, max_bytes=1 << 22))
        for shard, control in enumerate(cluster.controls)
    ]


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
def test_cuts_on_the_way_are_the_reference_at_their_step(clip_norm: float) -> None:
    job = death_job(clip_norm)
    with Cluster(job, ps=2, cut_every=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.train([[0], [1, 2]])
        for step in (2, 4):
            assert_same_end(cluster.state(cut_of(cluster, step)), reference(job, step))
        cluster.controls[0].release(cluster.timeline, 2)
        with pytest.raises(ProtocolError, match=r"has no complete cut of step 2; it has \[4\]"):
            cut_of(cluster, 2)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
def test_a_rollback_to_a_cut_ends_in_the_same_bits(clip_norm: float) -> None:
    job = death_job(clip_norm)
    with Cluster(job, ps=2, cut_every=2, bucket_bytes=SMALL_BUCKETS) as cluster:
        workers = cluster.train([[0], [1, 2]], steps=4)
        images = cut_of(cluster, 2)
        # A contribution of the old history is held when it ends.

        def straggle() -> None:
            with pytest.raises((Restart, Interrupted)):
                workers[0].step([0])

        interrupted = threading.Thread(target=straggle)
        interrupted.start()
        wait_for(lambda: all(counted(cluster, shard, 0) for shard in range(2)), "the straggler's push")
        cluster.configure_anew(cluster.timeline + 1)
        for shard, control in enumerate(cluster.controls):
            control.restore(cluster.timeline, shard, functools.partial(iter, images[shard]))
        for control in cluster.controls:
            control.activate(cluster.timeline)
        interrupted.join(PATIENCE_S)
        assert not interrupted.is_alive()
        assert [counted(cluster, shard, 0) for shard in range(2)] == [0, 0]
        assert_same_end(cluster.state(), reference(job, 2))
        cluster.train([[0, 1], [2]])
        assert_same_end(cluster.state(), expected_end(clip_norm))


def test_the_step_before_a_restore_was_never_published_here() -> None:
    job = death_job()
    with Cluster(job, cut_every=2) as cluster:
        worker = cluster.worker(0).run([0, 1, 2], 2)
        images = cut_of(cluster, 2)
        cluster.configure_anew(cluster.timeline + 1)
        cluster.controls[0].restore(cluster.timeline, 0, lambda: images[0])
        cluster.controls[0].activate(cluster.timeline)
        worker.trainer.locate([0], cluster.timeline)
        with pytest.raises(
            Restart, match="overtaken: step 1 of bucket 0 is no longer available; the bucket is at step 2"
        ):
            worker.trainer.exchange.start(
                cluster.sender("worker/0"),
                {0: ShardTask(shard=0, contributions=[], want=Want(step=1))},
            ).wait()
        worker.trainer.exchange.arm()
        worker.trainer.locate([0], cluster.timeline)
        assert worker.trainer.step == 2


def test_a_stop_ends_every_worker_at_its_step_with_a_cut_of_it() -> None:
    job = death_job()
    with Cluster(job, ps=2) as cluster:
        workers = [cluster.worker(0), cluster.worker(1)]
        for control in cluster.controls:
            assert control.cut(cluster.timeline, 3, stop=True) == (False, 0)

        def run(worker: Worker, replicas: list[int]) -> None:
            with pytest.raises(Stopped, match="stops at step 3"):
                worker.run(replicas, job.steps)

        cluster.together([lambda: run(workers[0], [0, 1]), lambda: run(workers[1], [2])])
        assert_same_end(cluster.state(), reference(job, 3))
        assert_same_end(cluster.state(cut_of(cluster, 3)), reference(job, 3))


def test_a_cut_asked_for_too_late_stops_nothing_and_leaves_no_copies() -> None:
    job = death_job()
    with Cluster(job, bucket_bytes=SMALL_BUCKETS) as cluster:
        cluster.worker(0).run([0, 1, 2], 3)
        assert cluster.controls[0].cut(cluster.timeline, 2, stop=True) == (True, 3)
        assert cluster.shards[0].cuts.status() == []
        cluster.worker(0).run([0, 1, 2], job.steps)
        assert_same_end(cluster.state(), expected_end(0.0))
