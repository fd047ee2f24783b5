"""Small pushes: one message each way, by every lane and from a plain client, and all promises kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardline.core.outcome import Outcome
from shardline.core.reduce import Block
from shardline.errors import UnreachableError
from shardline.lanes import calls
from shardline.lanes.call_socket import CallSocket
from shardline.lanes.grpc.client import GrpcLane
from shardline.lanes.shm.server import publish
from shardline.native.engine import available
from shardline.rpc.channel import Peer
from shardline.rpc.v1 import common_pb2, data_pb2
from shardline.server import push_receiver
from shardline.server.incoming_push import stands_inline
from shardline.waist import Payload, Push, Want, Whole
from tests.support.cluster import Ps
from tests.support.lanes import TIMEOUTS, Bench, ShmBench, TcpBench, floats, gradient, payload
from tests.support.plain_client import DEADLINE_S, ELEMENTS, FIRST_W, FROZEN, RATE, STATS, PlainClient
from tests.support.waiting import wait_for

AFTER_ONE = tuple(value - RATE for value in FIRST_W)


class GrpcBench(Bench[GrpcLane]):
    """The stream's own lane, told that the shard has one bucket: what it sends has no more than one."""

    def __init__(self, ps: Ps) -> None:
        self.ps = ps
        self.peer = Peer(ps.task, ps.address, TIMEOUTS)
        self.lane = GrpcLane(self.peer, 0, [ELEMENTS])

    def close(self) -> None:
        self.lane.close()
        self.peer.close()


def at_once(frames: Sequence[data_pb2.PushFrame], pull: data_pb2.PullRequest | None) -> data_pb2.PushPullRequest:
    """A push of one chunk, and a pull, as one message."""
    whole = data_pb2.PushFrame()
    for frame in frames:
        whole.MergeFrom(frame)
    return data_pb2.PushPullRequest(push=whole, pull=pull)


def test_a_plain_client_gets_one_message_for_one(client: PlainClient) -> None:
    client.start()
    request = at_once(client.gradient(chunk_bytes=1 << 20), client.pull_request(exact_step=1, have_step=0, buckets=[0]))
    replies = list(client.stub.PushPull(iter([request]), timeout=DEADLINE_S))
    assert len(replies) == 1
    assert replies[0].ack.outcome == common_pb2.OUTCOME_COUNTED
    assert replies[0].pull.bucket.step == 1 and replies[0].pull.chunk.payload[: 4 * 12] == floats(AFTER_ONE)[: 4 * 12]
    assert replies[0].pull.end.outcome == common_pb2.OUTCOME_SERVED


def test_the_ack_of_a_step_that_waits_for_others_does_not_wait(client: PlainClient) -> None:
    client.start(replicas=2)
    request = at_once(client.gradient(chunk_bytes=1 << 20), client.pull_request(exact_step=1, wait_s=15.0))
    replies = client.stub.PushPull(iter([request]), timeout=DEADLINE_S)
    first = next(replies)
    assert first.ack.outcome == common_pb2.OUTCOME_COUNTED and not first.HasField("pull")
    assert client.push(client.gradient(block=(1, 1))).outcome == common_pb2.OUTCOME_COUNTED
    rest = list(replies)
    assert not any(reply.HasField("ack") for reply in rest)
    assert rest[-1].pull.end.outcome == common_pb2.OUTCOME_SERVED


def test_a_pull_that_came_with_the_first_push_waits_for_the_second_of_its_call(client: PlainClient) -> None:
    client.start(replicas=2)
    requests = [
        at_once(client.gradient(chunk_bytes=1 << 20), client.pull_request(exact_step=1, wait_s=15.0)),
        at_once(client.gradient(block=(1, 1), chunk_bytes=1 << 20), None),
    ]
    replies = list(client.stub.PushPull(iter(requests), timeout=DEADLINE_S))
    acks = [reply.ack.outcome for reply in replies if reply.HasField("ack")]
    assert acks == [common_pb2.OUTCOME_COUNTED] * 2
    ends = [reply.pull.end.outcome for reply in replies if reply.pull.HasField("end")]
    assert ends == [common_pb2.OUTCOME_SERVED]
    assert client.weights() == AFTER_ONE


@dataclass
class Made:
    """Calls of exchanges: of gRPC, or a weak reference to the lane's socket that carried one."""

    small: list[Any] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The calls of lanes that are opened from now on."""
    found = Made()

    begin = calls.ShardCalls.begin

    def by_grpc(lane: Any, *arguments: Any) -> Any:
        found.small.append(begin(lane, *arguments))
        return found.small[-1]

    plain = CallSocket.call

    def over_socket(one: CallSocket, *arguments: Any, single: bool) -> Any:
        (found.small if single else found.streams).append(weakref.ref(one))
        return plain(one, *arguments, single=single)

    monkeypatch.setattr(CallSocket, "call", over_socket)
    monkeypatch.setattr(calls.ShardCalls, "begin", by_grpc)
    return found


@pytest.fixture(params=[ShmBench, GrpcBench, *([TcpBench] if available() else [])])
def bench(request: pytest.FixtureRequest, ps: Ps, client: PlainClient, made: Made) -> Iterator[Any]:
    if request.param is ShmBench:
        ps.store.make_publication = publish
    client.start()
    opened = request.param(ps)
    yield opened
    opened.close()


def test_a_small_exchange_needs_no_stream(bench: Any, made: Made) -> None:
    sink = bench.sink()
    want = Want(step=1, buckets=[0], wait_s=5.0)
    done = bench.exchange(gradient(), want, sink=sink)
    assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
    assert done.end is not None and done.end.outcome is Outcome.SERVED
    assert sink.weights() == AFTER_ONE and len(made.small) == 1
    # Once more: it was counted, and is told so.
    again = bench.exchange(gradient())
    assert [ack.outcome for ack in again.acks] == [Outcome.DUPLICATE]
    assert not made.streams


def test_a_small_exchange_that_ends_early_leaves_nothing_behind(bench: Any, made: Made) -> None:
    want = Want(step=1, buckets=[0], wait_s=15.0)
    refused = bench.exchange(gradient(step=7), want)
    assert [ack.outcome for ack in refused.acks] == [Outcome.REFUSED]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bench.exchange, None, want)
        wait_for(lambda: len(made.small) == 2 and bool(bench.ps.servicer.calls.open), "the pull to be asked for")
        bench.lane.cancel()
        with pytest.raises(UnreachableError):
            waiting.result(10.0)
    wait_for(lambda: not bench.ps.servicer.calls.open, "the pull to end at the server")
    # Its error holds the frames that it came through.
    del waiting
    gc.collect()
    # No other way: gRPC frees a call, with all that it holds, when nothing of it is due.
    left = [call() if isinstance(call, weakref.ref) else sorted(call._state.due) or None for call in made.small]
    assert left == [None, None]


def test_a_step_without_gradients_is_one_message_and_counted_where_it_is_read(
    bench: Any, client: PlainClient, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[bool] = []

    def noted(*arguments: Any) -> bool:
        where.append(stands_inline(*arguments))
        return where[-1]

    monkeypatch.setattr(push_receiver, "stands_inline", noted)
    for step in range(3):
        nothing = Push(payloads=Whole([], (0, FROZEN, STATS)), step=step)
        done = bench.exchange(nothing, Want(step=step + 1, have_step=step, buckets=[0], wait_s=5.0))
        assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
        assert done.end is not None and done.end.outcome is Outcome.SERVED
    # Two steps have to be published before they can be the same.
    assert where == [False, True, True]
    assert len(made.small) == 3 and not made.streams
    # A gradient counts as ever, and only once.
    assert [bench.exchange(gradient(step=3)).acks[0].outcome for _ in range(2)] == [Outcome.COUNTED, Outcome.DUPLICATE]
    assert client.weights() == AFTER_ONE


class Late(Whole):
    """Payloads that come when they are let."""

    def __init__(self) -> None:
        super().__init__([payload(floats([1.0] * 12))], (FROZEN, STATS))
        object.__setattr__(self, "asked", threading.Event())
        object.__setattr__(self, "go_on", threading.Event())

    asked: threading.Event
    go_on: threading.Event

    def batches(self) -> Iterator[Sequence[Payload]]:
        self.asked.set()
        assert self.go_on.wait(10.0)
        yield from super().batches()


def test_a_small_push_that_is_given_up_before_its_gradients_come_never_leaves(bench: Any, client: PlainClient) -> None:
    late = Late()
    push = Push(payloads=late, step=0, block=Block(0, 1))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.exchange, push)
        assert late.asked.wait(5.0)
        bench.lane.cancel()
        late.go_on.set()
        with pytest.raises(UnreachableError):
            running.result(5.0)
    # Not counted: the step is still open, and the same push completes it.
    assert client.progress(0).replicas[0].step == 0
    done = bench.exchange(gradient())
    assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
    assert client.weights() == AFTER_ONE
