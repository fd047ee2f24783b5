"""A new history on servers that go on living: what the one before held is let go, and nothing of it counts any more."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardline.client.exchange.shard_exchange import Restart
from shardline.lanes.negotiated import NegotiatedLane
from shardline.lanes.shm.client import ShmLane
from shardline.lanes.tcp.client import TcpLane
from tests.support.cluster import TIMELINE, Cluster, Worker
from tests.support.jobs import Wide, make_job
from tests.support.waiting import wait_for

NEXT = TIMELINE + 1


class Counter(nn.Module):
    """Zeros, in two tensors so that there are two shards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(64))
        self.second = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() + self.first.sum() + self.second.sum()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is freed is freed at once, not when a cycle is found."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def held_by(worker: Worker) -> list[weakref.ref[object]]:
    """Segments and sockets of a worker's lanes."""
    found: list[weakref.ref[object]] = []
    for lane in worker.trainer.exchange.lanes.values():
        assert isinstance(lane, NegotiatedLane)
        current = lane.current
        if isinstance(current, ShmLane):
            assert current.mapped is not None
            found.append(weakref.ref(current.mapped))
        if isinstance(current, TcpLane):
            assert current.sockets is not None
            found.append(weakref.ref(current.sockets))
    return found


@pytest.mark.parametrize(("lane", "mode"), [("shm", "sync"), ("tcp", "async")])
def test_memory_and_sockets_of_the_history_before_are_let_go_when_the_next_one_begins(
    lane: str, mode: str, no_collection: None
) -> None:
    job = make_job("adam", model=Wide, steps=2, consistency=mode)
    with Cluster(job, ps=2, bucket_bytes=1 << 18, lane=lane) as cluster:
        worker = cluster.worker(0)
        if mode == "sync":
            worker.run(range(cluster.spec.replicas), 2)
        else:
            worker.run_async([0, 1])
        held = held_by(worker)
        assert len(held) == 2
        shards = [weakref.ref(shard) for shard in cluster.shards]
        cluster.configure_anew(NEXT)
        worker.trainer.close()
        assert [item() for item in held] == [None, None]
        # The last thread of the pool may be about to leave its work.
        wait_for(lambda: all(shard() is None for shard in shards), "the shards to be freed")


def test_each_asynchronous_push_counts_once_though_histories_change_under_it() -> None:
    """SGD at rate 1 with gradients of 1: a value is minus the number of pushes that were applied."""
    job = make_job("sgd", model=Counter, optimizer_args={"lr": 1.0}, steps=1, consistency="async")
    with Cluster(job, ps=2) as cluster:
        over = threading.Event()
        found: dict[int, dict[int, int]] = {}

        def push(worker: Worker) -> None:
            trainer = worker.trainer
            while True:
                trainer.exchange.arm()
                try:
                    trainer.locate([0], cluster.timeline)
                    found[worker.index] = dict(trainer.half.acknowledged)
                    if over.is_set():
                        return
                    while not over.is_set():
                        trainer.begin()
                        trainer.contribute(0, {name: torch.ones_like(item) for name, item in worker.values.items()})
                        trainer.finish()
                except Restart:
                    trainer.give_up()

        def change() -> None:
            for number in range(1, 9):
                before = [shard.version for shard in cluster.shards]
                wait_for(
                    lambda before=before: all(  # type: ignore[misc]
                        shard.version > version for shard, version in zip(cluster.shards, before, strict=True)
                    ),
                    "a push to every shard",
                )
                cluster.configure_anew(TIMELINE + number, keep=(0, 1))
                for control in cluster.controls:
                    control.activate(cluster.timeline)
            over.set()

        workers = [cluster.worker(index) for index in range(2)]
        cluster.together([change, *(functools.partial(push, worker) for worker in workers)])
        for number, shard in enumerate(cluster.shards):
            pushes = sum(acknowledged[number] for acknowledged in found.values())
            assert shard.version == pushes, (shard.version, pushes)
            assert pushes > 0
            assert all(bool((bucket.values == -pushes).all()) for bucket in shard.buckets)
