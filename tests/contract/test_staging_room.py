"""Room for contributions that wait for others: who finds none is told so, and holds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from shardline.rpc.v1 import common_pb2
from shardline.server.staging import Ask, StagingLease
from tests.support.cluster import Ps
from tests.support.plain_client import FIRST_W, RATE, PlainClient
from tests.support.refusals import says


@pytest.fixture
def full(ps: Ps, client: PlainClient) -> Iterator[PlainClient]:
    """A client of a shard of four replicas that has room for tree order, and none beside."""
    ps.store.staging_bytes = 1
    ps.store.staging_wait_s = 0.1
    client.start(replicas=4)
    yield client
    assert ps.store.staging.in_use == 0 and not ps.store.staging.ledger.entries


def test_a_push_without_room_is_told_for_whom_it_waits_and_counts_when_they_have_come(full: PlainClient) -> None:
    for method in ("Push", "PushPull"):
        frames = full.gradient(block=(2, 1))
        if method == "Push":
            ack = full.push(frames)
        else:
            (ack,) = full.acks(frames, full.pull_request(exact_step=1, wait_s=15.0))
        assert ack.outcome == common_pb2.OUTCOME_WAITING
        assert says(ack.reason, r"shard 0, bucket 0, replicas 2: no room for 512 bytes after 0\.1 s; 0 of 1,024 bytes")
        assert says(ack.reason, r"Step 0 is waiting for replicas 0, 1, 2, 3: check what delays their workers")
    for replica in range(4):
        assert full.push(full.gradient(block=(replica, 1))).outcome == common_pb2.OUTCOME_COUNTED
    assert full.weights() == tuple(value - RATE for value in FIRST_W)


def test_the_waits_of_one_stream_have_one_limit_since_its_sender_has_one_deadline(
    ps: Ps, client: PlainClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps.store.staging_wait_s = 5.0
    client.start(replicas=2)
    left_s: list[float] = []
    reserve = ps.store.staging.reserve

    async def slowly(ask: Ask, patience_s: float) -> StagingLease:
        left_s.append(patience_s)
        await asyncio.sleep(0.2)
        return await reserve(ask, patience_s)

    def nothing(ask: Ask) -> None:
        """No room without a wait."""

    monkeypatch.setattr(ps.store.staging, "lend", nothing)
    monkeypatch.setattr(ps.store.staging, "reserve", slowly)
    pushes = [frame for replica in range(2) for frame in client.gradient(block=(replica, 1))]
    acks, _, end = client.push_pull(pushes, client.pull_request(exact_step=1))
    assert [ack.outcome for ack in acks] == [common_pb2.OUTCOME_COUNTED] * 2 and end.step == 1
    assert left_s[0] == 5.0 and left_s[1] <= 4.8
