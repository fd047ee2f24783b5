"""What a store sets aside: told at start, and counted until it is applied."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.gradients import Gradient
from shardline.core.plan import Plan, make_plan
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, ScheduleSpec, TensorSpec
from shardline.server.staging import Ask
from shardline.update import rule
from shardline_ps.service import offers
from shardline_ps.store import ParameterStore, PsConfiguration
from tests.support.builders import roll_back
from tests.support.pushes import configure

MB = 1_000_000


def plan() -> Plan:
    return make_plan(
        [TensorSpec(name=f"t{n}", shape=(1024, 100), dtype="float32") for n in range(3)], 1, bucket_bytes=4 << 20
    )


def configuration(**more: object) -> PsConfiguration:
    values: dict[str, object] = {
        "job": "job",
        "timeline": 1,
        "plan": plan(),
        "shards": (0,),
        "rule": rule("SGD", ({"lr": 0.5, "momentum": 0.9},)),
        "schedule": ScheduleSpec(),
        "consistency": ConsistencySpec(),
        "replicas": 3,
        "cut_every": 10,
        "codec": "raw",
    }
    return PsConfiguration(**{**values, **more})  # type: ignore[arg-type]


def test_the_sum_of_memory_is_told_at_start(caplog: pytest.LogCaptureFixture) -> None:
    store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
    store.lane_bytes = lambda configuration: 3 * MB
    one = plan().shards[0].nbytes
    assert store.memory_plan(configuration()) == {
        "parameters": 2 * one,
        "optimizer": one,
        "cuts": 2 * 2 * one,
        "staging": one + (64 << 20),
        "lanes": 3 * MB,
    }
    assert store.memory_plan(configuration(cut_every=0))["cuts"] == 2 * one
    loop = asyncio.new_event_loop()
    try:
        with caplog.at_level(logging.INFO, logger="shardline.ps"):
            configure(store, configuration(), loop)
    finally:
        loop.close()
        store.close()
    total = sum(store.memory_plan(configuration()).values())
    assert f"memory: parameters 2 x {one / 1e6:.1f} MB, optimizer {one / 1e6:.1f} MB, cuts" in caplog.text
    assert f"lanes 3.0 MB; {total / 1e6:.1f} MB in total" in caplog.text


def test_a_limit_below_the_least_is_raised_and_told(caplog: pytest.LogCaptureFixture) -> None:
    store = ParameterStore(device=torch.device("cpu"), pool_threads=1, staging_bytes=1000)
    loop = asyncio.new_event_loop()
    try:
        configure(store, configuration(), loop)
    finally:
        loop.close()
        store.close()
    assert store.staging.limit == plan().shards[0].nbytes
    assert "the limit of staging is 1.2 MB instead of the 0.0 MB requested" in caplog.text


def test_contributions_of_a_shard_count_as_staged_until_they_are_applied() -> None:
    async def run(store: ParameterStore) -> None:
        configure(store, configuration(), asyncio.get_running_loop())
        shard, size = store.shards[0], plan().shards[0].nbytes
        (bucket,) = shard.buckets
        shard.initialize(0, torch.zeros(bucket.spec.elements))
        waiting = asyncio.create_task(store.staging.reserve(Ask(0, 0, Block(2, 1), 80 * MB, step=0), 10.0))
        await asyncio.sleep(0)
        for replica, held in ((0, size), (1, size), (2, 0)):
            if replica == 2:
                # The last one finds its sibling: it may come in whatever it holds.
                lease = await asyncio.wait_for(waiting, 10.0)
                assert store.staging.in_use == size + 80 * MB
                lease.release()
            else:
                assert store.staging.waiting == 1
            values, present = torch.ones(bucket.spec.elements), (True,) * len(bucket.spec.slices)
            await store.work(shard.contribute, 0, 0, Block(replica, 1), Gradient(values, present))
            assert shard.partial_bytes == held

    store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
    try:
        asyncio.run(run(store))
    finally:
        store.close()


def test_a_voted_total_counts_as_staged_until_its_verdict() -> None:
    store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
    loop = asyncio.new_event_loop()
    try:
        configure(store, configuration(replicas=1, consistency=ConsistencySpec(clip_norm=1.0)), loop)
        shard, size = store.shards[0], plan().shards[0].nbytes
        (bucket,) = shard.buckets
        for dropped in (False, True):
            values = torch.ones(bucket.spec.elements)
            shard.contribute(0, shard.step_min, Block(0, 1), Gradient(values, (True,) * len(bucket.spec.slices)))
            assert store.staging.in_use == size
            voted = shard.mode.vote(shard.step_min)
            assert voted is not None and store.staging.in_use == size
            if dropped:
                roll_back(shard)
            else:
                shard.mode.apply_verdict(voted[1], scale=1.0, skip=False)
            assert store.staging.in_use == 0
    finally:
        loop.close()
        store.close()


@pytest.mark.parametrize("lane", ["grpc", "tcp", "auto"])
def test_the_copies_of_which_asynchronous_workers_are_answered_are_part_of_the_sum_on_every_lane(lane: str) -> None:
    store = ParameterStore(device=torch.device("cpu"), pool_threads=1)
    cluster = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",)})
    made = offers(RoleConfig(role="ps", index=0, cluster=cluster, lane=lane), store, lambda method, error: None)
    try:
        one = plan().shards[0].nbytes
        copied = configuration(consistency=ConsistencySpec(mode="async"), replicas=1)
        assert store.memory_plan(copied)["lanes"] == one
        assert store.memory_plan(configuration())["lanes"] == 0
    finally:
        for offer in made:
            offer.close()
        store.close()
