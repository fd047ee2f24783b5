"""Callers that ask for much and read nothing: they are let go within their time, and hold up nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from shardline import Job
from shardline.rpc.messages.data import state_request
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, parameter_server_pb2_grpc
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
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 4096), nn.Linear(4096, 2)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        dataset=Points,
        optimizer="SGD",
        optimizer_args={"lr": 0.01},
        batch_size=4,
        steps=2,
        **getattr(request, "param", {}),
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


CALLS: dict[str, Callable[[Any, Cluster], Any]] = {
    "GetCut": lambda stub, cluster: stub.GetCut(
        parameter_server_pb2.GetCutRequest(timeline=TIMELINE, shard=0, step=0), timeout=10 * PATIENCE_S
    ),
    "GetState": lambda stub, cluster: stub.GetState(
        state_request(cluster.workers[0].trainer.sender, 0, 0, ()), timeout=10 * PATIENCE_S
    ),
}


@pytest.mark.parametrize("cluster", [{"apply": "worker"}], indirect=True)
@pytest.mark.parametrize("method", CALLS)
def test_states_that_nobody_reads_are_let_go_within_their_time(cluster: Cluster, method: str) -> None:
    (ps,) = cluster.hosts
    cluster.controls[0].cut(TIMELINE, 0)
    ended: list[str] = []
    ps.servicer.on_refused = lambda method, error: ended.append(method)
    with grpc.insecure_channel(ps.address, options=NARROW) as channel:
        call = CALLS[method](parameter_server_pb2_grpc.ParameterServerStub(channel), cluster)
        next(call)
        wait_for(lambda: ended == [method], "the call to be let go")
        with pytest.raises(grpc.RpcError, match="its caller read nothing of the answer for"):
            list(call)
