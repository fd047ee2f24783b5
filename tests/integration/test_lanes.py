"""One suite for every lane: the same bits, the same retries, and what a lane can't carry goes by another."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from shardline.client.exchange.shard_exchange import Interrupted
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.job import Job
from shardline.testing import ReferenceResult, reference
from tests.support.cluster import Cluster, Worker, assert_same_end
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, make_job
from tests.support.lanes import usable

LANES = usable(["grpc", "tcp", "shm"])
SMALL_BUCKETS = 4096


class Hollow(nn.Module):
    """Tensors without elements: beside others in a bucket, and of a dtype and of kinds that nothing else has."""

    empty_buffer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 1)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.nothing_double = nn.Parameter(torch.zeros(4, 0, dtype=torch.float64))
        self.nothing_frozen = nn.Parameter(torch.zeros(0), requires_grad=False)
        self.register_buffer("empty_buffer", torch.zeros(0, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.out(x) + self.nothing.sum() + self.nothing_double.sum().float()
        return value


@functools.cache
def job_of(kind: str) -> Job:
    match kind:
        case "rich":
            return make_job("adam", model=Rich, steps=4)
        case "voted":
            return make_job("adam", model=Rich, steps=4, clip_norm=0.05)
        case "wide":
            return make_job("adam", model=Wide, steps=3)
        case "hollow":
            return make_job("adam", model=Hollow, steps=3)
        case other:
            raise ValueError(other)


@functools.cache
def expected(kind: str) -> ReferenceResult:
    return reference(job_of(kind))


def lane_names(worker: Worker) -> set[str]:
    return {lane.name for lane in worker.trainer.exchange.lanes.values()}


@pytest.mark.parametrize(("lane", "kind"), covering(LANES, ["rich", "voted", "wide"]))
def test_every_lane_gives_the_bits_of_the_reference(lane: str, kind: str) -> None:
    with Cluster(job_of(kind), ps=2, bucket_bytes=SMALL_BUCKETS if kind != "wide" else 1 << 18, lane=lane) as cluster:
        workers = cluster.train([[0, 2], [1]])
        assert_same_end(cluster.state(), expected(kind))
        assert [lane_names(worker) for worker in workers] == [{lane}, {lane}]


@pytest.mark.parametrize("lane", LANES)
def test_tensors_without_elements_travel_on_every_lane(lane: str) -> None:
    with Cluster(job_of("hollow"), lane=lane) as cluster:
        empty = [bucket for shard in cluster.plan.shards for bucket in shard.buckets if bucket.nbytes == 0]
        assert empty
        workers = cluster.train([[0, 2], [1]])
        assert_same_end(cluster.state(), expected("hollow"))
        assert [lane_names(worker) for worker in workers] == [{lane}, {lane}]
        assert all(host.store.staging.in_use == 0 for host in cluster.hosts)


Values = Mapping[str, torch.Tensor]


def asynchronous_end(lane: str) -> tuple[Values, Values]:
    """What the shards and the worker hold."""
    job = make_job("momentum", model=Wide, steps=3, consistency="async")
    with Cluster(job, ps=2, bucket_bytes=1 << 18, lane=lane) as cluster:
        worker = cluster.worker(0).run_async([0, 1, 2])
        return cluster.state().params, {name: value.clone() for name, value in worker.values.items()}


def rounded_end(lane: str, codec: str) -> Values:
    job = make_job("adam", model=Wide, steps=2, codec=codec)
    with Cluster(job, ps=1, bucket_bytes=1 << 18, lane=lane) as cluster:
        cluster.train([[0], [1, 2]])
        return cluster.state().params


asynchronous_end_on_grpc = functools.cache(functools.partial(asynchronous_end, "grpc"))
rounded_end_on_grpc = functools.cache(functools.partial(rounded_end, "grpc"))


@pytest.mark.parametrize("lane", LANES)
def test_asynchronous_pushes_are_those_of_the_grpc_lane(lane: str) -> None:
    for ours, theirs in zip(asynchronous_end(lane), asynchronous_end_on_grpc(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("lane", "codec"), covering(LANES, ["bf16", "fp16"]))
def test_rounding_codecs_travel_on_every_lane(lane: str, codec: str) -> None:
    ours, theirs = rounded_end(lane, codec), rounded_end_on_grpc(codec)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("lane", LANES)
def test_an_exchange_that_is_interrupted_is_made_again_and_counts_once(lane: str) -> None:
    job = job_of("wide")
    with Cluster(job, ps=1, bucket_bytes=1 << 18, lane=lane) as cluster:
        worker = cluster.worker(0)
        worker.trainer.exchange.arm()
        worker.trainer.locate(range(job.replicas), cluster.timeline)
        (held,) = worker.trainer.exchange.lanes.values()
        stop = threading.Event()

        def disturb() -> None:
            while not stop.wait(0.003):
                held.cancel()

        while worker.trainer.step < job.steps:
            disturber = threading.Thread(target=disturb, daemon=True)
            disturber.start()
            timer = threading.Timer(0.1, stop.set)
            timer.start()
            worker.step(range(job.replicas))
            stop.set()
            disturber.join(5.0)
            timer.cancel()
            stop.clear()
        assert_same_end(cluster.state(), expected("wide"))


@pytest.mark.parametrize("lane", LANES)
def test_a_new_life_of_a_worker_opens_a_lane_of_its_own_and_the_old_one_is_closed(lane: str) -> None:
    job = job_of("wide")
    with Cluster(job, ps=1, bucket_bytes=1 << 18, lane=lane, members={"worker/0": 1}) as cluster:
        old = cluster.worker(0).run(range(job.replicas), 1)
        cluster.controls[0].set_membership(cluster.timeline, {"worker/0": 2})
        assert cluster.hosts[0].attachments.count().get(lane, 0) == 0
        cluster.worker(0, incarnation=2).run(range(job.replicas), job.steps)
        assert_same_end(cluster.state(), expected("wide"))
        standing = old.trainer.exchange.standing(cluster.sender("worker/0"), 0, [0])
        assert standing.outcome is Outcome.FENCED


@pytest.mark.parametrize("offered", ["grpc", "auto"], ids=["another lane", "no native library"])
def test_a_lane_that_the_ps_does_not_offer_is_left_with_one_sentence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, offered: str
) -> None:
    job = job_of("wide")
    if offered == "auto":
        monkeypatch.setattr("shardline.native.engine.available", lambda: False)
    with Cluster(job, ps=1, lane=offered) as cluster:
        cluster.worker(0, lane="tcp").run(range(job.replicas), job.steps)
        assert_same_end(cluster.state(), expected("wide"))
    ((lane, reason),) = cluster.fallbacks
    assert lane == "tcp" and ("grpc" in reason or "shm" in reason)
    assert sum("lane tcp can't be used" in record.getMessage() for record in caplog.records) == 1


class Hurried:
    """A clock of the client's on which twenty seconds pass in one: a timeout need not be waited for."""

    @staticmethod
    def monotonic() -> float:
        return 20.0 * time.monotonic()


@pytest.mark.parametrize("lane", LANES)
def test_who_waits_for_room_longer_than_the_timeout_goes_on_when_slow_workers_come(
    lane: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job("adam", model=Wide, steps=1, replicas=4)
    with Cluster(job, ps=1, bucket_bytes=1 << 18, lane=lane, timeouts=Timeouts(total_s=30.0)) as cluster:
        staging = cluster.hosts[0].store.staging
        cluster.hosts[0].store.staging_wait_s = 0.1
        # Room for tree order, and none for replicas 1 and 3 before 0 and 2.
        staging.ledger.limit = staging.ledger.reserved
        late = threading.Event()
        asked: dict[int, float] = {}
        monkeypatch.setattr("shardline.client.exchange.shard_exchange.time", Hurried)

        def run(replica: int) -> set[str]:
            worker = cluster.worker(replica)
            exchange = worker.trainer.exchange

            def still_ordered() -> bool:
                first_s = asked.setdefault(replica, Hurried.monotonic())
                if len(asked) == 2 and Hurried.monotonic() - first_s > 1.5 * cluster.timeouts.total_s:
                    late.set()
                return True

            worker.orders.still_ordered = still_ordered
            exchange.arm()
            worker.trainer.locate([replica], cluster.timeline)
            if replica in (0, 2):
                assert late.wait(20.0)
            worker.step([replica])
            return lane_names(worker)

        names = cluster.together([functools.partial(run, replica) for replica in range(job.replicas)])
        assert names == [{lane}] * job.replicas
        assert_same_end(cluster.state(), reference(job))
    told = [record.getMessage() for record in caplog.records if "has no room for this push yet" in record.getMessage()]
    assert any("Step 0 is waiting for replicas 0, 1, 2, 3" in sentence for sentence in told)
    assert not any("trying again" in record.getMessage() for record in caplog.records)


def test_a_push_that_waits_for_room_is_given_up_when_it_is_not_ordered_any_more() -> None:
    job = make_job("adam", model=Wide, steps=1, replicas=2)
    with Cluster(job, ps=1, bucket_bytes=1 << 18) as cluster:
        staging = cluster.hosts[0].store.staging
        cluster.hosts[0].store.staging_wait_s = 0.05
        staging.ledger.limit = staging.ledger.reserved
        worker = cluster.worker(1)
        worker.trainer.exchange.arm()
        worker.trainer.locate([1], cluster.timeline)
        worker.orders.still_ordered = lambda: False
        with pytest.raises(Interrupted):
            worker.step([1])
        assert staging.in_use == 0
