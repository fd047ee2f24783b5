"""The tcp lane between a real ps and a TcpLane: outcomes are the stream's, and what breaks it changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import select
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.errors import UnreachableError
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.tcp import client as tcp, frames as bulk
from shardline.lanes.tcp.server import TcpOffer
from shardline.native.engine import available
from shardline.rpc.messages.data import Attached, referred_requests
from shardline.waist import Payload, Sender, Want
from tests.support.cluster import Ps
from tests.support.lanes import (
    DEADLINE_S,
    SENDER,
    Taken,
    TcpBench,
    a_push_that_does_not_count_ends_the_exchange,
    contexts,
    gradient,
)
from tests.support.plain_client import FIRST_W, RATE, TIMELINE, PlainClient, floats, plan_id
from tests.support.refusals import unchanged

pytestmark = pytest.mark.skipif(not available(), reason="there is no native engine in this process")


@pytest.fixture(params=["plain", "tls"])
def bench(ps: Ps, ready: PlainClient, request: pytest.FixtureRequest) -> Iterator[TcpBench]:
    made = TcpBench(ps, None if request.param == "plain" else contexts())
    yield made
    made.close()


def test_a_push_that_does_not_count_ends_the_exchange_and_its_sockets(bench: TcpBench, ready: PlainClient) -> None:
    bench.exchange(gradient())
    old = bench.lane.sockets
    a_push_that_does_not_count_ends_the_exchange(bench)
    assert old is not None and not old.alive and bench.lane.sockets is None
    assert bench.exchange(gradient(), Want(step=1)).acks[0].outcome is Outcome.DUPLICATE


def test_another_life_of_the_worker_opens_sockets_of_its_own(bench: TcpBench) -> None:
    bench.pull(0)
    first = bench.lane.sockets
    later = Sender(job="plain", timeline=TIMELINE, plan_id=plan_id(), who=Identity("worker/0", 2))
    done = bench.exchange(want=Want(step=0), sender=later)
    assert done.end is not None and done.end.outcome is Outcome.SERVED
    assert first is not None and not first.alive and bench.open == 1


def test_a_worker_of_another_plan_is_told_so_and_not_that_there_is_no_such_lane(bench: TcpBench) -> None:
    other = dataclasses.replace(SENDER, plan_id="feed")
    end = bench.exchange(want=Want(step=0), sender=other).end
    assert end is not None and end.outcome is Outcome.NOT_CONFIGURED
    assert re.search("the plan is .* follows plan feed", end.reason)


def test_a_port_that_nobody_answers_makes_the_lane_unavailable(bench: TcpBench) -> None:
    bench.offer.close()
    with pytest.raises(LaneUnavailable, match=rf"bulk port {bench.offer.port} at 127.0.0.1 can't be used .*refused"):
        bench.pull(0)


def test_a_port_that_is_blocked_makes_the_lane_unavailable(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "DIAL_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bench.offer.port = silent.getsockname()[1]
        with pytest.raises(LaneUnavailable, match="timed out"):
            bench.pull(0)


@pytest.mark.parametrize("stolen", ["up_token", "down_token"])
def test_a_thief_who_shows_a_token_first_costs_the_worker_this_lane_and_learns_nothing(
    bench: TcpBench, ready: PlainClient, monkeypatch: pytest.MonkeyPatch, stolen: str
) -> None:
    opens = bench.lane.open_attachment
    thieves: list[socket.socket] = []

    def overheard(sender: Sender, *, timeout_s: float) -> Any:
        opened = opens(sender, timeout_s=timeout_s)
        thief = bench.dial(opened.port, getattr(opened, stolen))
        thieves.append(thief)
        # Bytes that no push refers to.
        thief.sendall(floats([9.0] * 12))
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(bench.lane, "open_attachment", overheard)
        with pytest.raises(LaneUnavailable, match="the token was refused"):
            bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    unchanged(ready)
    # The worker's next pair ends what the thief holds, and counts as ever.
    done = bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert done.end is not None and done.end.outcome is Outcome.SERVED and bench.open == 1
    assert ready.weights() == tuple(value - RATE for value in FIRST_W)
    (thief,) = thieves
    thief.settimeout(5.0)
    with contextlib.suppress(ConnectionError):
        assert thief.recv(1) == b""
    thief.close()


def test_bytes_are_referred_to_only_by_who_opened_their_sockets(bench: TcpBench, ready: PlainClient) -> None:
    bench.pull(0)
    assert bench.lane.sockets is not None
    ours = bench.lane.sockets.attached
    other = dataclasses.replace(SENDER, who=Identity("worker/1", 1))
    for sender, attached in ((other, ours), (SENDER, Attached("tcp", ours.number + 1)), (SENDER, Attached("tcp", 0))):
        requests = referred_requests(sender, 0, [gradient()], None, attached, place=lambda item: 0)
        with pytest.raises(UnreachableError, match=rf"attachment {attached.number:#x} .* is not open"):
            bench.lane.converse(requests, [gradient()], None, Taken(), timeout_s=DEADLINE_S)
    unchanged(ready)
    # None of this cost the worker its sockets.
    sockets = bench.lane.sockets
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert bench.lane.sockets is sockets


def test_a_used_token_is_of_no_use_from_another_connection_or_at_another_server(bench: TcpBench) -> None:
    opened = bench.lane.open_attachment(SENDER, timeout_s=DEADLINE_S)
    other = TcpOffer("127.0.0.1", bench.server_tls, timeout_s=5.0, take=bench.ps.store.buffers.take)
    try:
        for port in (other.port, opened.port):
            for token in (opened.up_token, opened.down_token):
                if port == opened.port:
                    bench.dial(port, token).close()
                with pytest.raises(bulk.RefusedError):
                    bench.dial(port, token)
    finally:
        other.close()


@pytest.mark.parametrize("sent", [0, 1, 255])
def test_a_push_cut_within_its_bytes_counts_no_bucket_and_a_retry_completes_the_step(
    bench: TcpBench, ready: PlainClient, sent: int
) -> None:
    opened = bench.lane.open_attachment(SENDER, timeout_s=DEADLINE_S)
    up = bench.dial(opened.port, opened.up_token)

    def after(batch: Sequence[Payload]) -> None:
        bulk.send_all(up, memoryview(batch[0].data)[:sent])
        up.close()

    requests = referred_requests(
        SENDER, 0, [gradient()], None, Attached("tcp", opened.attachment), place=lambda item: 0, after=after
    )
    with pytest.raises(UnreachableError, match="closed its socket in the middle of a transfer"):
        bench.lane.converse(requests, [gradient()], None, Taken(), timeout_s=DEADLINE_S)
    unchanged(ready)
    done = bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert done.end is not None and done.end.outcome is Outcome.SERVED and bench.open == 1
    assert ready.weights() == tuple(value - RATE for value in FIRST_W)


def test_opening_sockets_is_cancelled_too(bench: TcpBench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        bench.offer.port, port = silent.getsockname()[1], bench.offer.port
        running = pool.submit(bench.pull, 0)
        assert select.select([silent], [], [], DEADLINE_S)[0], "the lane does not dial"
        bench.lane.cancel()
        with pytest.raises(UnreachableError, match="abandoned"):
            running.result(5.0)
    bench.offer.port = port
    assert bench.pull(0).heads
