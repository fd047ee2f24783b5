"""Workers behind aggregators: the bits of one process, whatever is between."""

from __future__ import annotations

import pytest

from shardline.testing import reference
from tests.support.aggregators import Aggregated
from tests.support.cluster import assert_same_end
from tests.support.jobs import Wide, make_job


@pytest.mark.parametrize("lane", ["grpc", "tcp", "shm"])
@pytest.mark.parametrize("ownership", [[[0], [1]], [[0, 1], [2], [3, 4]]], ids=str)
def test_the_bits_are_those_of_one_process(ownership: list[list[int]], lane: str) -> None:
    job = make_job("adam", topology="aggregators", model=Wide, replicas=sum(map(len, ownership)), steps=4)
    with Aggregated(job, ps=2, lane=lane, workers=len(ownership)) as cluster:
        cluster.train(ownership)
        assert_same_end(cluster.state(), reference(job))


def test_one_push_goes_up_and_one_pull_serves_all() -> None:
    job = make_job("sgd", topology="aggregators", model=Wide, replicas=4, steps=6)
    with Aggregated(job, workers=4, lane="grpc") as cluster:
        cluster.train([[0], [1], [2], [3]])
        assert_same_end(cluster.state(), reference(job))
        (shard,) = cluster.shards
        # In the first step nobody knows yet who contributes.
        assert shard.tally.pushes <= 4 + 5
        size = cluster.plan.shards[0].nbytes
        assert cluster.moved["pull", "ps/0"] <= size * (job.steps + 1)
        assert cluster.moved["push", "ps/0"] <= size * (4 + 5)
