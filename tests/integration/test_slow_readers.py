"""Callers that ask for much and read nothing: they are let go within their time, and hold up nobody else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
import torch
from torch import nn

from shardline import Job
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2_grpc
from tests.support.cluster import PATIENCE_S, TIMELINE, Cluster
from tests.support.waiting import wait_for

READER_S = 1.0
STREAMS = 20
NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
"""A client that takes little before somebody reads it."""


class Points:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), float(index)), index % 2


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 4096), nn.Linear(4096, 2)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        dataset=Points,
        optimizer="SGD",
        optimizer_args={"lr": 0.01},
        batch_size=4,
        steps=2,
    )
    with Cluster(job, ps=1) as made:
        made.hosts[0].servicer.calls.reader_s = READER_S
        yield made


def test_pulls_that_nobody_reads_end_within_their_time_and_delay_no_other(cluster: Cluster) -> None:
    (ps,) = cluster.hosts
    data = common_pb2.DataHeader(
        job=cluster.view.job.name,
        timeline=TIMELINE,
        plan_id=cluster.plan.plan_id,
        task="worker/9",
        incarnation=1,
        protocol_minor=1,
    )
    pull = data_pb2.PullRequest(data=data, latest=True, wait_s=5.0)
    calls = ps.servicer.calls
    with grpc.insecure_channel(ps.address, options=NARROW) as channel:
        stub = parameter_server_pb2_grpc.ParameterServerStub(channel)
        pulls = [stub.Pull(pull, timeout=PATIENCE_S) for _ in range(STREAMS)]
        both = stub.PushPull(iter([data_pb2.PushPullRequest(pull=pull)]), timeout=PATIENCE_S)
        wait_for(lambda: len(calls.open) == STREAMS + 1, "all of them to be served")
        began_s = time.monotonic()
        # Somebody else trains to the end meanwhile.
        cluster.train([[0]])
        wait_for(lambda: not calls.open, "all of them to be let go")
        assert time.monotonic() - began_s < PATIENCE_S / 2
        for call in (*pulls, both):
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
