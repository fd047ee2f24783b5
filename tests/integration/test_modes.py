"""SoftSync and bounded staleness over real servers."""

from __future__ import annotations

import threading

import torch

from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.testing import reference
from shardline.waist import Want
from tests.support.cluster import Cluster, Worker, assert_same_end
from tests.support.jobs import make_job
from tests.support.waiting import wait_for


def push(worker: Worker, batch: int) -> None:
    """One push, and the pull after it."""
    worker.compute(batch, 0)
    worker.figures.append(worker.trainer.finish())


def begun(cluster: Cluster, index: int) -> Worker:
    worker = cluster.worker(index)
    worker.trainer.exchange.arm()
    worker.trainer.locate([0], cluster.timeline)
    return worker


def test_the_fastest_waits_for_the_slowest_until_that_has_pushed_or_rests() -> None:
    with Cluster(make_job("sgd", consistency="ssp:slack=2"), ps=2, timeouts=Timeouts(total_s=6.0)) as cluster:
        fast, slow = begun(cluster, 0), begun(cluster, 1)
        for batch in range(2):
            push(fast, batch)
        ahead = threading.Thread(target=push, args=(fast, 2), daemon=True)
        ahead.start()
        late = "pushes of worker/1"
        wait_for(lambda: all(shard.mode.late() == late for shard in cluster.shards), "the fast one to wait")
        assert [shard.version for shard in cluster.shards] == [3, 3]
        same = cluster.worker(0).trainer
        same.weights.sinks[1].begin()
        latest = Want(step=None, wait_s=0.05)
        done = same.exchange.lanes[1].exchange(
            cluster.sender("worker/0"), [], latest, same.weights.sinks[1], timeout_s=5
        )
        assert done.end is not None and done.end.outcome is Outcome.WAITING
        assert done.end.reason == "a pull is waiting for pushes of worker/1 at shard 1 after 0.1 s"
        assert len(fast.figures) == 2
        push(slow, 3)
        ahead.join(10.0)
        assert not ahead.is_alive() and len(fast.figures) == 3
        # It has read what it waited for: nothing of the next push is stale.
        push_again = threading.Thread(target=push, args=(fast, 4), daemon=True)
        push_again.start()
        wait_for(lambda: all(shard.version == 5 for shard in cluster.shards), "one more push")
        wait_for(
            lambda: all(shard.mode.late() == late for shard in cluster.shards),
            "the fast one to wait again",
        )
        # No work is left for the slow one.
        slow.trainer.standings(())
        push_again.join(10.0)
        assert not push_again.is_alive()
        assert fast.figures[-1].staleness == 0


def test_a_worker_that_joins_late_goes_on_from_the_slowest_at_every_shard() -> None:
    with Cluster(make_job("sgd", consistency="ssp:slack=1"), ps=2) as cluster:
        first = begun(cluster, 0)
        for batch in range(5):
            push(first, batch)
        second = begun(cluster, 1)
        for batch in range(3):
            push(second, batch)
            push(first, batch)
        assert [shard.mode.progress(0) for shard in cluster.shards] == [8, 8]
        assert [shard.version for shard in cluster.shards] == [11, 11]


def test_without_slack_the_bits_are_those_of_the_synchronous_job() -> None:
    job = make_job("momentum", consistency="ssp:slack=0")
    with Cluster(job, ps=2) as cluster:
        cluster.train([[0, 1], [2]])
        assert_same_end(cluster.state(), reference(make_job("momentum", consistency="sync")))


def test_one_worker_has_the_bits_of_async_in_both_modes() -> None:
    expected = reference(make_job("momentum", consistency="async"), 6).params
    for mode in ("softsync", "ssp"):
        job = make_job("momentum", consistency=mode)
        assert all(torch.equal(value, expected[name]) for name, value in reference(job, 6).params.items())
        with Cluster(job, ps=2) as cluster:
            cluster.worker(0).run_async(range(6))
            found = cluster.state().params
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_softsync_makes_one_update_of_each_workers_push() -> None:
    with Cluster(make_job("sgd", consistency="softsync:n=1"), ps=2, members={"worker/0": 1, "worker/1": 1}) as cluster:
        workers = [begun(cluster, index) for index in range(2)]
        for batch in range(4):
            for worker in workers:
                push(worker, batch)
        assert [(shard.version, shard.tally.pushes, shard.partial_bytes) for shard in cluster.shards] == [(4, 8, 0)] * 2
        # The first of each round has pulled before the second completes it.
        assert [shard.tally.staleness_sum for shard in cluster.shards] == [3, 3]
