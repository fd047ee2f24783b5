"""A second service on the server half of push and pull: an aggregator serves sums over every lane of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.exchange import Contribution, Exchanged, Want, Whole
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block
from shardline.errors import ProtocolError
from shardline.lanes import LANES
from shardline.rpc.channel import Peer
from shardline.rpc.messages.convert import plan_from_proto
from shardline.server.backend import Backend, HostedShard
from tests.conformance.toys.toy_backend import Aggregator
from tests.support.lanes import DEADLINE_S, SENDER, TIMEOUTS, Mapping, payload
from tests.support.plain_client import FROZEN, STATS, TIMELINE, floats, plan

MEMBERS = {"worker/0": 1, "worker/1": 1}
pytestmark = pytest.mark.parametrize("lane", LANES.names)


def config(lane: str) -> RoleConfig:
    cluster = ClusterSpec({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:0",)})
    return RoleConfig(role="ps", index=0, cluster=cluster, timeouts=TIMEOUTS, lane=lane)


@pytest.fixture
def sums(lane: str) -> Iterator[Aggregator]:
    made = Aggregator(config(lane), "plain", TIMELINE, plan_from_proto(plan()), MEMBERS)
    backend: Backend = made
    shard: HostedShard = backend.shard(0)
    assert shard.number == 0
    yield made
    made.close()


class Member:
    """One worker, using one lane."""

    def __init__(self, sums: Aggregator, lane: str, index: int, incarnation: int = 1) -> None:
        self.index = index
        self.sender = dataclasses.replace(SENDER, who=Identity(f"worker/{index}", incarnation))
        self.peer = Peer("aggregator/0", sums.address, TIMEOUTS)
        self.lane = LANES.parse(lane).connect(config(lane), self.peer, 0, sums.plan.shards[0])
        self.sink = Mapping()

    def push(self, value: float, step: int, want: Want | None = None, **more: object) -> Exchanged:
        items = [payload(floats([value] * 12))]
        push = Contribution(
            payloads=Whole(items, (FROZEN, STATS)),
            step=step,
            block=Block(self.index, 1),
            **more,  # type: ignore[arg-type]
        )
        return self.lane.exchange(self.sender, [push], want, self.sink, timeout_s=DEADLINE_S)

    def pull(self, step: int, wait_s: float = 5.0) -> Exchanged:
        return self.lane.exchange(self.sender, [], Want(step=step, wait_s=wait_s), self.sink, timeout_s=DEADLINE_S)

    def close(self) -> None:
        self.lane.close()
        self.peer.close()


@pytest.fixture
def members(sums: Aggregator, lane: str) -> Iterator[list[Member]]:
    made = [Member(sums, lane, index) for index in range(2)]
    yield made
    for member in made:
        member.close()


def test_the_sum_of_all_members_is_served_step_after_step(sums: Aggregator, members: list[Member]) -> None:
    for step, (left, right) in enumerate([(1.0, 3.0), (0.5, -2.0), (10.0, 20.0)]):
        first = members[0].push(left, step)
        assert [ack.outcome for ack in first.acks] == [Outcome.COUNTED]
        done = members[1].push(right, step, Want(step=step + 1, wait_s=5.0))
        assert done.end is not None and done.end.outcome is Outcome.SERVED
        assert members[0].pull(step + 1).end is not None
        for member in members:
            assert member.sink.weights() == (left + right,) * 12
    assert sums.bytes_in == 6 * 256 and sums.bytes_out > 0


def test_a_push_made_again_counts_once(members: list[Member]) -> None:
    members[0].push(1.0, 0)
    assert members[0].push(1.0, 0).acks[0].outcome is Outcome.DUPLICATE
    members[1].push(3.0, 0)
    members[0].pull(1)
    assert members[0].sink.weights() == (4.0,) * 12


def test_a_pull_says_who_is_missing(members: list[Member]) -> None:
    members[1].push(1.0, 0)
    end = members[1].pull(1, wait_s=0.2).end
    assert end is not None and end.outcome is Outcome.WAITING and end.waiting_for == (0,)


def test_progress_is_asked_of_it_as_of_any_server(members: list[Member]) -> None:
    members[1].push(1.0, 0)
    standing = members[0].lane.progress(members[0].sender, [0, 1], timeout_s=DEADLINE_S)
    assert dict(standing.replicas) == {0: 0, 1: 1}


def test_who_is_no_member_is_told_so(sums: Aggregator, lane: str) -> None:
    stranger = Member(sums, lane, 0, incarnation=7)
    assert [ack.outcome for ack in stranger.push(1.0, 0).acks] == [Outcome.FENCED]
    stranger.close()


def test_what_it_does_not_take_is_refused_in_words(members: list[Member]) -> None:
    with pytest.raises(ProtocolError, match="an aggregator has no first values"):
        members[0].lane.exchange(
            members[0].sender,
            [Contribution(payloads=Whole([payload(floats([1.0] * 12), bucket) for bucket in range(3)]), init=True)],
            None,
            members[0].sink,
            timeout_s=DEADLINE_S,
        )
