"""Workers behind aggregators: the bits of one process, whatever is between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardline.codecs.base import Fidelity
from shardline.codecs.cast import Bf16
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, UnreachableError
from shardline.job import Job
from shardline.lanes import LANES
from shardline.rpc.channel import Peer
from shardline.testing import reference
from shardline.waist import Sender
from tests.support.aggregators import Aggregated
from tests.support.cluster import Cluster, assert_same_end, same_bits
from tests.support.jobs import Wide, make_job


def assert_same_with_and_without(job: Job, ownership: list[list[int]], lane: str = "grpc") -> None:
    """Train the job with flat topology, then through an aggregator: the parameters have the same bits."""
    ends = []
    for topology, cluster_of, more in (("flat", Cluster, {}), ("aggregators", Aggregated, {"workers": len(ownership)})):
        with cluster_of(replace(job, topology=topology), ps=2, lane=lane, **more) as cluster:
            cluster.train(ownership)
            ends.append(cluster.state().params)
    for name, value in ends[0].items():
        assert same_bits(value, ends[1][name]), name


@pytest.mark.parametrize("lane", ["grpc", "tcp", "shm"])
@pytest.mark.parametrize("ownership", [[[0], [1]], [[0, 1], [2], [3, 4]]], ids=str)
def test_the_bits_are_those_of_one_process(ownership: list[list[int]], lane: str) -> None:
    job = make_job("adam", topology="aggregators", model=Wide, replicas=sum(map(len, ownership)), steps=4)
    with Aggregated(job, ps=2, lane=lane, workers=len(ownership)) as cluster:
        cluster.train(ownership)
        assert_same_end(cluster.state(), reference(job))


@pytest.mark.parametrize(
    ("lane", "codecs"),
    [
        ("tcp", {"codec": "bf16"}),
        ("shm", {"codec_up": "topk:ratio=0.1", "codec_down": "delta:by=int8,refresh=2"}),
        ("grpc", {"codec_up": "powersgd", "codec_down": "lossless", "codec_tensors": {"rows.bias": "fp16"}}),
        ("tcp", {"codec_up": "sign-vote", "codec_down": "delta:by=topk,refresh=4"}),
        ("shm", {"codec_up": "onebit-adam:warmup=2"}),
    ],
    ids=str,
)
def test_a_codec_gives_the_bits_that_it_gives_without_an_aggregator(lane: str, codecs: dict[str, Any]) -> None:
    assert_same_with_and_without(
        make_job("adam", model=Wide, replicas=4, steps=6, checkpoint_every=4, **codecs), [[0, 1], [2], [3]], lane=lane
    )


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


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.1},
        {"nan_policy": "skip"},
        {"bucket": True},
    ],
    ids=str,
)
def test_all_synchronous_steps_go_through(settings: dict[str, Any]) -> None:
    small = settings.pop("bucket", False)
    job = make_job("momentum", topology="aggregators", model=Wide, replicas=3, steps=4, **settings)
    with Aggregated(job, ps=2, aggregators=2, workers=3, bucket_bytes=256 if small else None) as cluster:
        cluster.train([[0], [1], [2]])
        assert_same_end(cluster.state(), reference(job))


@pytest.mark.parametrize(
    "stranger", [{"who": Identity("worker/0", 7)}, {"timeline": 99 << 32}], ids=["life", "timeline"]
)
def test_who_comes_by_orders_that_an_aggregator_does_not_get_is_sent_to_the_servers(stranger: dict[str, Any]) -> None:
    job = make_job("sgd", topology="aggregators", replicas=2, steps=1)
    with Aggregated(job, lane="grpc", timeouts=Timeouts(total_s=4.0)) as cluster:
        peer = Peer("aggregator/0", cluster.aggregators[0].address, cluster.timeouts)
        lane = LANES.parse("grpc").connect(cluster.lane_config("grpc"), peer, 0, cluster.plan.shards[0])
        view, who = cluster.view, Identity("worker/0", 1)
        known = Sender(job=view.job.name, timeline=view.timeline, plan_id=view.plan.plan_id, who=who)
        assert lane.standing(known, [0], timeout_s=4.0).outcome is Outcome.SERVED
        with pytest.raises(UnreachableError, match="does not have the orders by which its member came"):
            lane.standing(replace(known, **stranger), [0], timeout_s=4.0)
        lane.close()
        peer.close()


def test_local_training_goes_through() -> None:
    job = make_job("sgd", model=Wide, replicas=3, steps=4, cadence="diloco:every=2")
    assert_same_with_and_without(job, [[0], [1], [2]])


def test_a_codec_that_would_change_parameters_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bf16, "fidelity", Fidelity.LOSSY)
    job = make_job("sgd", topology="aggregators", codec_down="bf16")
    with pytest.raises(JobError, match="other ones than codec bf16 gives; choose topology='flat', or another codec_do"):
        job.spec(job.build_model())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"consistency": "async"}, "one pull of a step serve several workers, but in consistency async"),
        ({"consistency": "sync:spares=1", "replicas": 2}, "the servers go on without a slow worker"),
        ({"apply": "worker"}, "leaves the optimizer to the servers"),
    ],
    ids=str,
)
def test_what_an_aggregator_can_not_do_is_refused_before_training(settings: dict[str, Any], sentence: str) -> None:
    job = make_job("sgd", topology="aggregators", **settings)
    with pytest.raises(JobError, match=sentence):
        job.spec(job.build_model())
