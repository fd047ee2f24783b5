"""What applies to every lane in the table: a real parameter server, a worker's half of it, and faults between.

Tests for single lanes are in tests/contract/test_<name>_lane.py and the unit tests of their halves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block
from shardline.errors import ProtocolError, ShardlineError, UnreachableError
from shardline.lanes import AUTO, CHOICES, LANES, OPENED, candidates, offered, token_acceptor
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.negotiated import NegotiatedLane
from shardline.rpc.channel import Peer
from shardline.rpc.messages import data
from shardline.seams import doc_line
from shardline.waist import Arrival, Payload, Push, Want, Whole
from tests.support.cluster import Ps
from tests.support.device_memory import played
from tests.support.lanes import (
    CPU,
    DEADLINE_S,
    SENDER,
    TIMEOUTS,
    KindBench,
    Mapping,
    connected,
    gradient,
    on_loop,
    payload,
    usable,
)
from tests.support.plain_client import FIRST_W, FROZEN, RATE, STATS, PlainClient, W, floats
from tests.support.refusals import unchanged
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
STEPPED = tuple(value - RATE for value in FIRST_W)
every_lane = pytest.mark.parametrize("name", usable(LANES.names))
every_opened_lane = pytest.mark.parametrize("name", usable(OPENED))


@pytest.fixture
def bench(name: str, ps: Ps, client: PlainClient) -> Iterator[KindBench]:
    made = KindBench(name, ps)
    client.start()
    yield made
    made.close()


@pytest.fixture
def two(name: str, ps: Ps, client: PlainClient) -> Iterator[KindBench]:
    """The same for a job of two replicas."""
    made = KindBench(name, ps)
    client.start(replicas=2)
    yield made
    made.close()


def of(replica: int, value: float, *, items: Sequence[Payload] | None = None) -> Push:
    """A push of one replica for step 0."""
    items = [payload(floats([value] * 12))] if items is None else items
    return Push(payloads=Whole(items, (FROZEN, STATS)), step=0, block=Block(replica, 1))


def at_hand(octets: bytes, *, step: int = 0) -> Push:
    """A push that may leave before anything is heard of it."""
    return Push(payloads=Whole([payload(octets)], (FROZEN, STATS), at_once=True), step=step, block=Block(0, 1))


def hears_refusal(sock: socket.socket) -> bool:
    """Whether the stranger is refused, with a message of the lane's or without."""
    with contextlib.suppress(ConnectionError):
        sock.recv(1)
    return True


# The bytes


@every_lane
def test_one_opening_serves_many_exchanges(bench: KindBench) -> None:
    for step in range(5):
        done = bench.exchange(gradient(step=step), Want(step=step + 1, have_step=step, wait_s=5.0))
        assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
    assert bench.pull(5).weights() == tuple(value - 5 * RATE for value in FIRST_W)
    assert bench.openings == bench.open == (1 if bench.kind.name in OPENED else 0)


@every_lane
def test_a_reader_that_is_slow_holds_up_nobody_else(two: KindBench) -> None:
    looks, goes_on = threading.Event(), threading.Event()

    class Slow(Mapping):
        def pause(self) -> None:
            looks.set()
            assert goes_on.wait(DEADLINE_S)

        def buffer(self, arrival: Arrival) -> memoryview:
            self.pause()
            return super().buffer(arrival)

        def take(self, arrival: Arrival, memory: memoryview) -> None:
            self.pause()
            super().take(arrival, memory)

    slow, other = Slow(), two.another()
    sender = dataclasses.replace(SENDER, who=Identity("worker/1", 1))
    with ThreadPoolExecutor(1) as pool:
        try:
            running = pool.submit(two.exchange, want=Want(step=0, wait_s=5.0), sink=slow)
            assert looks.wait(DEADLINE_S)
            for replica, value in enumerate((1.0, 3.0)):
                done = other.exchange(sender, [of(replica, value)], None, two.sink(), timeout_s=DEADLINE_S)
                assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
        finally:
            goes_on.set()
        assert running.result(DEADLINE_S).end is not None
    assert slow.weights() == FIRST_W
    other.close()


@every_lane
def test_a_push_that_is_at_hand_leaves_in_one_message(bench: KindBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SMALL_BYTES", 0)
    threads: set[str] = set()
    started = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (threads.add(thread.name), started(thread))[1])
    for step in range(3):
        sink = bench.sink()
        done = bench.exchange(at_hand(floats([1.0] * 12), step=step), Want(step=step + 1, wait_s=5.0), sink=sink)
        assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
        assert sink.weights() == tuple(value - (step + 1) * RATE for value in FIRST_W)
    # No other thread sends it.
    assert "calls" not in threads


# What is refused


@every_lane
@pytest.mark.parametrize("ready", [False, True])
def test_more_bytes_than_a_bucket_has_are_refused_by_their_number(
    bench: KindBench, client: PlainClient, ready: bool
) -> None:
    # Far more than the buffers on the way hold: the shard's answer comes before the connection breaks.
    push = at_hand(bytes(64 << 20)) if ready else gradient(items=[payload(bytes(64 << 20))])
    with pytest.raises(ProtocolError, match=r"67108864 bytes (announced|don.t fit)"):
        bench.exchange(push, Want(step=1, wait_s=5.0))
    unchanged(client)
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert client.weights() == STEPPED


@every_lane
def test_a_gradient_that_is_refused_changes_nothing(bench: KindBench, client: PlainClient) -> None:
    with pytest.raises(ShardlineError, match=r"gradient of 'w' from replicas .* has NaN or infinity"):
        bench.exchange(gradient(float("nan")), Want(step=1, wait_s=5.0))
    unchanged(client)
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert client.weights() == STEPPED and bench.open == (1 if bench.kind.name in OPENED else 0)


@every_lane
def test_bytes_that_travel_are_compared_with_their_digest(bench: KindBench, client: PlainClient) -> None:
    lying = dataclasses.replace(payload(floats([1.0] * 12)), digest=1)
    if bench.lane.by_reference:
        # The bytes stay where the worker made them; nothing was sent.
        assert [ack.outcome for ack in bench.exchange(gradient(items=[lying])).acks] == [Outcome.COUNTED]
        return
    with pytest.raises(ProtocolError, match="bucket 0: the digest of the received bytes differs"):
        bench.exchange(gradient(items=[lying]))
    unchanged(client)
    client.complete()


# Tokens and strangers


@every_opened_lane
def test_a_wrong_token_is_refused_and_counted(bench: KindBench, monkeypatch: pytest.MonkeyPatch) -> None:
    given = type(bench.lane).open_attachment  # type: ignore[attr-defined]

    def with_wrong_tokens(lane: Any, *arguments: Any, **settings: Any) -> Any:
        opened = given(lane, *arguments, **settings)
        # Correct in its first bytes, which are used to look it up.
        for key in ("up_token", "down_token", "token"):
            setattr(opened, key, getattr(opened, key)[:16] + bytes(16))
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(type(bench.lane), "open_attachment", with_wrong_tokens)
        with pytest.raises(LaneUnavailable, match="refused"):
            bench.pull(0)
    assert bench.acceptor.refused == 1
    wait_for(lambda: bool(bench.said), "the refusal to be told")
    assert "its token is wrong, was already used, or came too late" in str(bench.said[0])
    assert bench.pull(0).heads


@every_opened_lane
def test_a_token_is_good_once_and_its_first_bearer_goes_on(bench: KindBench, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = bench.opening()
    second = bench.another()
    monkeypatch.setattr(type(bench.lane), "open_attachment", lambda lane, *arguments, **settings: opened)
    assert bench.pull(0).heads
    with pytest.raises(LaneUnavailable, match="refused"):
        second.exchange(SENDER, [], Want(step=0), bench.sink(), timeout_s=DEADLINE_S)
    assert bench.pull(0).heads and bench.acceptor.refused == 1
    second.close()


@every_opened_lane
def test_a_token_that_comes_late_is_refused(bench: KindBench) -> None:
    bench.acceptor.tokens._valid_s = 0.0
    with pytest.raises(LaneUnavailable, match="refused"):
        bench.pull(0)


@every_opened_lane
def test_a_token_that_nobody_used_goes_with_its_worker(bench: KindBench) -> None:
    bench.opening()
    assert bench.open == 1 and len(bench.acceptor.tokens) >= 1
    on_loop(bench.ps, lambda: bench.ps.attachments.keep_only({"worker/0": 2}))
    assert bench.open == 0 and len(bench.acceptor.tokens) == 0


@every_opened_lane
@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, bytes(100)], ids=["http", "zeros"])
def test_noise_is_refused_and_the_next_one_is_served(bench: KindBench, said: bytes) -> None:
    with bench.call(said) as sock:
        assert hears_refusal(sock)
        wait_for(lambda: bench.acceptor.refused == 1, "the count")
    assert bench.pull(0).heads


@every_opened_lane
def test_who_says_nothing_does_not_stay(bench: KindBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_acceptor.Guest, "limit_s", 0.1)
    with bench.call() as silent:
        assert hears_refusal(silent)
        wait_for(lambda: bool(bench.said), "the refusal to be told")
    assert "no token within" in str(bench.said[0]) and bench.acceptor.guests == 0
    assert bench.pull(0).heads


@every_opened_lane
def test_a_crowd_that_says_nothing_keeps_a_worker_waiting_and_no_longer(
    bench: KindBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_acceptor.Guest, "limit_s", 0.2)
    monkeypatch.setattr(token_acceptor, "MAX_GUESTS", 3)
    crowd = [bench.call() for _ in range(8)]
    assert bench.pull(0).heads
    assert bench.acceptor.refused >= 5
    for one in crowd:
        one.close()


# If it is unavailable


@every_opened_lane
def test_a_server_without_the_lane_is_told_apart_from_one_that_is_gone(name: str, ps: Ps, client: PlainClient) -> None:
    client.start()
    peer = Peer(ps.task, ps.address, TIMEOUTS)
    kind = LANES.parse(name)
    lane = connected(kind, peer)
    with played():
        with pytest.raises(LaneUnavailable, match=f"can't open a {name} lane: this ps offers the lanes grpc"):
            lane.exchange(SENDER, [], Want(step=0), Mapping(), timeout_s=DEADLINE_S)
        ps.close()
        with pytest.raises(UnreachableError):
            lane.exchange(SENDER, [], Want(step=0), Mapping(), timeout_s=DEADLINE_S)
    lane.close()
    peer.close()


@every_opened_lane
def test_a_door_that_is_shut_makes_the_lane_unavailable_and_the_next_one_takes_over(bench: KindBench) -> None:
    told: list[str] = []
    left = candidates(bench.kind.name, local=True)[-1:]
    others = [connected(kind, bench.peer) for kind in left]
    pair = NegotiatedLane(
        [bench.lane, *others],
        peer=str(bench.peer),
        expected=[bench.kind.name],
        on_fallback=lambda lane, reason: told.append(lane),
    )
    bench.offer.close()
    sink = bench.sink()
    pair.exchange(SENDER, [gradient()], Want(step=1, wait_s=5.0), sink, timeout_s=DEADLINE_S)
    assert sink.weights() == STEPPED and told == [bench.kind.name] and pair.name == left[0].name
    pair.close()


# Closing and reopening


@every_opened_lane
def test_a_lane_that_broke_between_exchanges_is_opened_anew(bench: KindBench) -> None:
    bench.pull(0)
    bench.drop()
    with pytest.raises(UnreachableError):
        bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    done = bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert done.end is not None and done.end.outcome is Outcome.SERVED and bench.open == 1


@every_opened_lane
def test_a_fenced_worker_loses_its_lane(bench: KindBench) -> None:
    bench.pull(0)
    on_loop(bench.ps, lambda: bench.ps.attachments.keep_only({"worker/0": 2}))
    assert bench.open == 0
    with pytest.raises(UnreachableError):
        bench.pull(0)


@every_lane
def test_another_life_of_the_worker_opens_a_lane_of_its_own(bench: KindBench) -> None:
    bench.pull(0)
    later = dataclasses.replace(SENDER, who=Identity("worker/0", 2))
    done = bench.exchange(want=Want(step=0), sender=later)
    assert done.end is not None and done.end.outcome is Outcome.SERVED
    assert bench.open == (1 if bench.kind.name in OPENED else 0)


@every_lane
def test_an_exchange_is_cancelled_wherever_it_waits(bench: KindBench) -> None:
    waiting = threading.Event()

    class Payloads(Whole):
        def batches(self) -> Iterator[Sequence[Payload]]:
            waiting.set()
            yield from super().batches()

    bench.pull(0)
    push = Push(payloads=Payloads((), (W, FROZEN, STATS)), step=0, block=Block(0, 1))
    with ThreadPoolExecutor(1) as pool:
        # Waits for a step that is never completed.
        running = pool.submit(bench.exchange, push, Want(step=9, wait_s=15.0))
        assert waiting.wait(5.0)
        bench.lane.cancel()
        with pytest.raises(UnreachableError):
            running.result(5.0)
    assert bench.pull(0).heads


DYING_WORKERS = """
import os, sys, threading
from shardline.lanes import LANES
from tests.support.device_memory import install
from tests.support.lanes import *
from tests.conformance.test_lane import FROZEN, STATS, floats

class Stuck(Whole):
    # Not small: that would wait for its last bucket.
    nbytes = 1 << 20

    def batches(self):
        yield [payload(floats([1.0] * 12))]
        print(os.getpid(), flush=True)
        threading.Event().wait(60.0)

def work(name, address):
    install()
    lane = connected(LANES.parse(name), Peer("ps/0", address, TIMEOUTS))
    push = Push(payloads=Stuck((), (FROZEN, STATS)), step=0, block=Block(0, 1))
    lane.exchange(SENDER, [push], Want(step=1, wait_s=60.0), Mapping(), timeout_s=60.0)

for line in iter(sys.stdin.readline, ""):
    if os.fork() == 0:
        work(*line.split())
"""


@pytest.fixture(scope="module")
def dying_workers() -> Iterator[subprocess.Popen[str]]:
    """A process that is told lanes and addresses, forks a worker for each, and says its pid once a bucket was sent."""
    command = [sys.executable, "-c", DYING_WORKERS]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@every_lane
def test_a_worker_killed_in_mid_push_leaves_what_came_whole_and_its_next_life_completes_the_step(
    two: KindBench, dying_workers: subprocess.Popen[str]
) -> None:
    bucket = two.ps.store.shards[0].buckets[W]
    assert dying_workers.stdin is not None and dying_workers.stdout is not None
    print(two.kind.name, two.ps.address, file=dying_workers.stdin, flush=True)
    worker = int(dying_workers.stdout.readline())
    wait_for(lambda: bucket.contributions.counted == {0}, "the bucket to be counted")
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: two.open == 0, "the attachment to be dropped")
    assert [ack.outcome for ack in two.exchange(of(0, 9.0)).acks] == [Outcome.COUNTED]
    sink = two.sink()
    done = two.exchange(of(1, 3.0), Want(step=1, wait_s=5.0), sink=sink)
    assert done.end is not None and done.end.outcome is Outcome.SERVED
    # The mean of 1, from the dead worker, and 3.
    assert sink.weights() == tuple(value - 2 * RATE for value in FIRST_W)


@every_lane
def test_a_server_that_dies_during_an_exchange_is_unreachable(bench: KindBench) -> None:
    bench.pull(0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.exchange, want=Want(step=9, wait_s=15.0))
        wait_for(lambda: bool(bench.ps.servicer.calls.open), "the call to be there")
        bench.ps.close()
        with pytest.raises(UnreachableError):
            running.result(DEADLINE_S)


@every_lane
def test_nothing_is_left_of_a_lane_that_is_closed(bench: KindBench) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    bench.pull(0)
    gc.collect()
    bench.drop()
    before = held()
    lanes = [bench.another() for _ in range(8)]
    for number, lane in enumerate(lanes):
        sender = dataclasses.replace(SENDER, who=Identity(f"worker/{number}", 1))
        done = lane.exchange(sender, [], Want(step=0, wait_s=5.0), bench.sink(), timeout_s=DEADLINE_S)
        assert done.end is not None and done.end.outcome is Outcome.SERVED
    # Its workers don't need a thread each.
    assert threading.active_count() - before[1] < 8
    for lane in lanes:
        lane.close()
    bench.drop()
    wait_for(lambda: held()[0] <= before[0], "descriptors to be given back")


# The table


def test_the_lane_that_always_works_is_the_last_resort_of_every_choice() -> None:
    for choice in CHOICES:
        for local in (False, True):
            found = candidates(choice, local=local)
            assert found[-1].name not in OPENED and all(kind.name in OPENED for kind in found[:-1])
            assert choice in (AUTO, found[0].name)


def test_a_lane_of_one_host_is_tried_by_itself_only_where_both_may_be_on_one() -> None:
    near = candidates(AUTO, local=True)
    assert [kind.name for kind in near] == ["shm", "tcp", "grpc"]
    assert [kind.name for kind in candidates(AUTO, local=False)] == ["tcp", "grpc"]


def test_a_lane_of_one_gpu_is_tried_by_itself_only_where_the_model_is_on_one() -> None:
    gpu = torch.device("cuda", 0)
    assert [kind.name for kind in candidates(AUTO, local=True, device=gpu)] == list(reversed(LANES.names))
    assert candidates(AUTO, local=True, device=CPU) == candidates(AUTO, local=True)
    assert candidates(AUTO, local=False, device=gpu) == candidates(AUTO, local=False)


def test_a_server_offers_what_it_was_asked_for() -> None:
    assert sorted(kind.name for kind in offered(AUTO)) == list(OPENED)
    assert [[kind.name for kind in offered(name)] for name in LANES.names] == [[], ["tcp"], ["shm"], ["cuda"]]


@every_opened_lane
def test_nobody_outside_asks_for_it_by_name(name: str) -> None:
    folders = ("shardline", "services", "worker", "chief", "evaluator")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    outside = [path for path in sources if ROOT / "shardline" / "lanes" not in path.parents]
    assert len(outside) > 200
    # That one has the name of a type of device.
    names = [f"lanes.{name}", *([f'"{name}"'] if name != "cuda" else [])]
    asking = [path for path in outside if any(name in path.read_text() for name in names)]
    assert not asking, "a property of the lane says what others need to know"


@every_lane
def test_the_docs_say_what_it_is(name: str) -> None:
    lines = (ROOT / "docs" / "lanes.md").read_text().splitlines()
    row = next((line for line in lines if line.startswith(f"| `{name}` |")), "")
    assert doc_line(LANES[name]) in row, f"docs/lanes.md lacks | `{name}` | ... | {doc_line(LANES[name])} |"
