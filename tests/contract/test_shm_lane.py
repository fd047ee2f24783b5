"""The shm lane between a real ps and a ShmLane: outcomes are the stream's, and nobody is read after it vanished."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.client.exchange.shard_exchange import Interrupted
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block
from shardline.core.timeouts import Timeouts
from shardline.errors import ProtocolError, ShardlineError, UnreachableError, UsageError
from shardline.host import segments
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.shm.server import SegmentPublication, ShmOffer, publish
from shardline.rpc.messages.data import referred_requests
from shardline.rpc.v1 import common_pb2
from shardline.testing import reference
from shardline.waist import Arrival, Payload, Push, Want, Whole
from tests.support.cluster import Cluster, Ps, assert_same_end
from tests.support.jobs import Wide, make_job
from tests.support.lanes import (
    DEADLINE_S,
    GRADIENTS,
    SENDER,
    Mapping,
    ShmBench,
    a_push_that_does_not_count_ends_the_exchange,
    gradient,
    on_loop,
    payload,
)
from tests.support.plain_client import FIRST_W, FROZEN, RATE, STATS, PlainClient, W, floats
from tests.support.refusals import OUTCOMES, unchanged
from tests.support.segments import descriptors, knock_message, mappings, unsealed
from tests.support.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds are Linux's")


@pytest.fixture
def ps(ps: Ps) -> Ps:
    ps.store.make_publication = publish
    return ps


@pytest.fixture
def bench(ps: Ps, ready: PlainClient) -> Iterator[ShmBench]:
    made = ShmBench(ps)
    yield made
    made.close()


# What the stream does too


def test_a_step_in_shared_memory_ends_as_on_the_stream(bench: ShmBench, ready: PlainClient) -> None:
    sink = Mapping()
    done = bench.exchange(gradient(), Want(step=1, wait_s=5.0), sink=sink)
    assert [ack.outcome for ack in done.acks] == [Outcome.COUNTED]
    assert done.end is not None and (done.end.outcome, done.end.step) == (Outcome.SERVED, 1)
    assert sink.weights() == tuple(value - RATE for value in FIRST_W) == ready.weights()
    assert sorted(head.bucket for head in sink.heads) == [0, 1, 2]
    assert {head.bucket: head.place[0] for head in sink.heads} == {W: 1, FROZEN: 0, STATS: 1}


def test_a_gradient_computed_in_the_lanes_memory_is_read_where_it_lies(bench: ShmBench, ready: PlainClient) -> None:
    assert bench.lane.allocate(W, 256) is None
    bench.pull(0)
    memory = bench.lane.allocate(W, 256)
    assert memory is not None and bench.lane.allocate(W, 257) is None
    memory[:] = floats([1.0] * 12)
    mapped = bench.lane.mapped
    assert mapped is not None and mapped.holds(memory) == bench.lane.offset(W)
    bench.exchange(gradient(items=[payload(memory)]), Want(step=1, wait_s=5.0))
    assert mapped.used == {bench.lane.offset(W)}
    assert ready.weights() == tuple(value - RATE for value in FIRST_W)


def test_memory_that_the_shard_may_still_read_is_not_given_out_again(bench: ShmBench) -> None:
    bench.pull(0)
    bench.exchange(gradient())
    first = bench.lane.mapped
    assert first is not None and first.is_read
    assert bench.lane.allocate(W, 256) is None and bench.lane.allocate(STATS, 256) is not None
    bench.pull(1)
    assert not first.is_read and bench.lane.allocate(W, 256) is not None
    bench.exchange(gradient(step=1))
    bench.exchange(gradient(step=2))
    assert bench.lane.mapped is not first


def test_a_push_that_does_not_count_ends_the_exchange_and_its_segments(bench: ShmBench) -> None:
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    old = bench.lane.mapped
    a_push_that_does_not_count_ends_the_exchange(bench)
    assert old is not None and bench.lane.mapped is None
    assert bench.exchange(gradient(), Want(step=1)).acks[0].outcome is Outcome.DUPLICATE


def test_a_gradient_that_is_refused_changes_nothing_and_is_not_read_again(bench: ShmBench, ready: PlainClient) -> None:
    with pytest.raises(ShardlineError, match=r"gradient of 'w' from replicas .* has NaN or infinity"):
        bench.exchange(gradient(float("nan")), Want(step=1, wait_s=5.0))
    unchanged(ready)
    assert bench.lane.mapped is None
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert bench.open == 1


def test_only_exact_steps_are_asked_for_on_this_lane(bench: ShmBench) -> None:
    with pytest.raises(ProtocolError, match="something other than an exact step; use lane grpc"):
        bench.exchange(want=Want(step=None))


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_push_that_is_not_admitted_costs_only_its_own_sender_a_lane(
    bench: ShmBench, ready: PlainClient, case: str
) -> None:
    settings, outcome, _ = OUTCOMES[case]
    bench.pull(0)
    mapped = bench.lane.mapped
    assert mapped is not None
    number = mapped.attached.number
    lane = settings["data"].get("lane", common_pb2.LANE_SHM)

    def push(**data: int) -> None:
        ack = ready.push(ready.gradient(data={**settings["data"], **data}))
        assert ack.outcome == common_pb2.Outcome.Value(f"OUTCOME_{outcome}")

    # Anybody can say these names; the number is told to nobody but the worker.
    for data in ({}, {"lane": lane}, {"lane": lane, "attachment": number + 1}, {"attachment": number}):
        push(**data)
        push(**data, incarnation=7)
    assert bench.open == 1
    push(lane=lane, attachment=number)
    assert bench.open == (0 if outcome in ("WRONG_TIMELINE", "NOT_CONFIGURED") else 1)
    unchanged(ready)


def test_a_lane_that_is_lost_with_its_place_in_the_history_is_opened_anew(bench: ShmBench, ready: PlainClient) -> None:
    bench.pull(0)
    bench.ps.store.authority.members = {"worker/0": 2}
    done = bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert [ack.outcome for ack in done.acks] == [Outcome.FENCED] and bench.open == 0
    bench.ps.store.authority.members = {"worker/0": 1}
    done = bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert done.end is not None and done.end.outcome is Outcome.SERVED and bench.open == 1


# Places


@pytest.mark.parametrize("offset", [1, 32, 1 << 20, (1 << 64) - 64])
def test_bytes_beyond_the_segment_or_at_a_crooked_place_are_refused(
    bench: ShmBench, ready: PlainClient, offset: int
) -> None:
    bench.pull(0)
    mapped = bench.lane.mapped
    assert mapped is not None
    requests = referred_requests(SENDER, 0, [gradient()], None, mapped.attached, place=lambda item: offset)
    with pytest.raises(ProtocolError, match=rf"256 bytes at {offset} of the segment of worker/0 is invalid"):
        bench.lane.converse(requests, [gradient()], None, Mapping(), timeout_s=DEADLINE_S)
    unchanged(ready)
    ready.complete()


def test_pushes_of_one_exchange_get_places_of_their_own(ps: Ps, client: PlainClient) -> None:
    client.start(replicas=3)
    bench = ShmBench(ps)
    pushes = [
        Push(payloads=Whole([payload(floats([value] * 12))], (FROZEN, STATS)), step=0, block=Block(number, 1))
        for number, value in enumerate((1.0, 2.0, 3.0))
    ]
    sink = Mapping()
    bench.lane.exchange(SENDER, pushes, Want(step=1, wait_s=5.0), sink, timeout_s=DEADLINE_S)
    mapped = bench.lane.mapped
    assert mapped is not None and sorted(mapped.used) == [segments.FIRST_BYTES + n * bench.length for n in range(3)]
    assert sink.weights() == tuple(value - 2 * RATE for value in FIRST_W)
    bench.close()


@pytest.mark.parametrize("held", range(3))
def test_what_lies_in_the_lanes_memory_keeps_its_bits_whichever_push_is_sent_first(
    ps: Ps, client: PlainClient, held: int
) -> None:
    client.start(replicas=3)
    bench = ShmBench(ps)

    def push(number: int, data: Any, step: int) -> Push:
        return Push(payloads=Whole([payload(data)], (FROZEN, STATS)), step=step, block=Block(number, 1))

    sink = Mapping()
    first = [push(number, floats([1.0] * 12), 0) for number in range(3)]
    bench.lane.exchange(SENDER, first, Want(step=1, wait_s=5.0), sink, timeout_s=DEADLINE_S)
    before = sink.weights()
    place = bench.lane.allocate(W, 256)
    assert place is not None
    place[:] = floats([7.0] * 12)
    data = [place if number == held else floats([float(number)] * 12) for number in range(3)]
    second = [push(number, item, 1) for number, item in enumerate(data)]
    bench.lane.exchange(SENDER, second, Want(step=2, wait_s=5.0), sink, timeout_s=DEADLINE_S)
    mean = torch.tensor(10.0 - held) / 3
    assert sink.weights() == tuple(float(torch.tensor(value) - RATE * mean) for value in before)
    assert bench.lane.mapped is not None and len(bench.lane.mapped.used) == 3
    bench.close()


def test_a_reply_that_points_outside_of_an_area_is_refused(bench: ShmBench) -> None:
    bench.pull(0)
    mapped = bench.lane.mapped
    assert mapped is not None

    def arrival(area: int, offset: int) -> Arrival:
        return Arrival(
            bucket=0, step=0, version=0, unchanged=False, codec="raw", payload_bytes=256, place=(area, offset)
        )

    assert len(mapped.view(arrival(1, bench.length - 256))) == 256
    with pytest.raises(ProtocolError, match=f"at {bench.length - 192} of area 1, which has {bench.length} bytes"):
        mapped.view(arrival(1, bench.length - 192))
    with pytest.raises(ProtocolError, match="area 2, which it has not passed"):
        mapped.view(arrival(2, 0))


# Strangers


def test_wrong_and_used_tokens_are_refused_and_descriptors_closed(bench: ShmBench) -> None:
    bench.pull(0)
    before = descriptors("shardline-test")
    token = bench.token()

    def knock(shown: bytes) -> int:
        return bench.knock(knock_message(shown, bench.length), [unsealed(bench.length, segments.FIXED)])

    assert knock(bytes(32)) == 0
    # Right in its first bytes, by which it is found.
    assert knock(token[:16] + bytes(16)) == 0
    assert knock(token) == 1
    assert knock(token) == 0
    assert bench.offer.acceptor.refused == 3
    on_loop(bench.ps, lambda: bench.ps.attachments.drop_all("a test"))
    gc.collect()
    assert descriptors("shardline-test") == before
    with pytest.raises(UnreachableError):
        bench.pull(0)
    assert bench.pull(0).heads


@pytest.mark.parametrize(
    ("seals", "said", "real"),
    [
        (0, 0, 0),
        (segments.FIXED & ~fcntl.F_SEAL_SHRINK, 0, 0),
        (segments.FIXED, 0, -64),
        (segments.FIXED, 0, 64),
        (segments.FIXED, -64, -64),
        (segments.FIXED, 1 << 30, 1 << 30),
    ],
    ids=["unsealed", "can shrink", "truncated", "longer than said", "too small", "too large"],
)
def test_a_segment_that_is_not_as_agreed_is_refused(bench: ShmBench, seals: int, said: int, real: int) -> None:
    """said, real: bytes more than one push has."""
    fd = unsealed(bench.length + real, seals)
    assert bench.knock(knock_message(bench.token(), bench.length + said), [fd]) == 0
    assert bench.offer.acceptor.refused == 1
    assert mappings("shardline-test") == set() and descriptors("shardline-test") == 0
    assert bench.pull(0).heads


def test_another_user_gets_no_segments(bench: ShmBench, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(LaneUnavailable, match=f"the process at the other end of the socket belongs to user {uid}"):
            bench.pull(0)
        assert bench.knock(knock_message(bench.token(), bench.length), []) == 0
        assert bench.offer.acceptor.refused >= 1
    assert bench.pull(0).heads


# Where it can't be


def test_a_socket_that_is_not_there_makes_the_lane_unavailable(bench: ShmBench) -> None:
    bench.offer.address = "@shardline-nobody"
    with pytest.raises(LaneUnavailable, match=r"through @shardline-nobody .*refused.* one network namespace"):
        bench.pull(0)


def test_memory_that_is_full_makes_the_lane_unavailable(bench: ShmBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "available_bytes", lambda: 100)
    with pytest.raises(LaneUnavailable, match="a shared segment of 2,816 bytes doesn't fit: 100 bytes"):
        bench.pull(0)


def test_a_shard_in_ordinary_memory_offers_no_lane(
    ps: Ps, client: PlainClient, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "available_bytes", lambda: 100)
        client.start()
    assert "parameters can't be published in shared memory" in caplog.text
    bench = ShmBench(ps)
    with pytest.raises(LaneUnavailable, match="shard 0 is not in shared memory on this ps"):
        bench.pull(0)
    client.complete()
    bench.close()


def test_a_socket_in_a_folder_is_this_users_alone_and_goes_with_its_server(
    ps: Ps, ready: PlainClient, folder: Path
) -> None:
    stale = folder / "shardline-0.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(stale))
    bench = ShmBench(ps, folder)
    path = Path(bench.offer.address)
    assert [path] == list(folder.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert bench.pull(0).heads
    bench.close()
    assert list(folder.iterdir()) == []


def test_a_folder_whose_path_is_too_long_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at most 100 bytes; see --run-dir"):
        ShmOffer(run_dir=tmp_path / ("x" * 100), timeout_s=1.0)


# Ends


def test_an_exchange_is_cancelled_while_it_waits_and_its_segments_are_never_written_again(bench: ShmBench) -> None:
    bench.pull(0)
    old = bench.lane.mapped
    waiting = threading.Event()

    class Payloads(Whole):
        def batches(self) -> Iterator[Sequence[Payload]]:
            waiting.set()
            yield from super().batches()

    push = Push(payloads=Payloads((), (W, FROZEN, STATS)), step=0, block=Block(0, 1))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.exchange, push, Want(step=9, wait_s=15.0))
        assert waiting.wait(5.0)
        bench.lane.cancel()
        with pytest.raises(UnreachableError):
            running.result(5.0)
    assert bench.lane.mapped is None
    assert bench.pull(0).heads and bench.lane.mapped is not old


def test_nothing_is_left_when_lane_and_server_are_closed(ps: Ps, client: PlainClient) -> None:
    gc.collect()
    before = descriptors("shardline"), mappings("shardline")
    client.start()
    bench = ShmBench(ps)
    bench.exchange(gradient(), Want(step=1, wait_s=5.0))
    assert isinstance(ps.store.shards[0].publication, SegmentPublication)
    # Two areas here and there, and the gradients at both ends.
    assert len(mappings("shardline") - before[1]) == 3
    bench.close()
    ps.close()
    ps.store.shards.clear()
    gc.collect()
    assert (descriptors("shardline"), mappings("shardline")) == before


DYING_WORKER = """
import sys, threading
from shardline.rpc.channel import Peer
from shardline.rpc.messages.data import referred_requests
from shardline.waist import Push
from tests.support.lanes import *

class Stuck(Whole):
    # No small one, which would wait for its last bucket.
    nbytes = 1 << 20

    def batches(self):
        yield [payload(floats([1.0] * 12))]
        print("sent", flush=True)
        threading.Event().wait(60.0)

lane = ShmLane(Peer("ps/0", sys.argv[1], TIMEOUTS), 0, spec(), timeout_s=TIMEOUTS.rpc_s)
push = Push(payloads=Stuck((), (FROZEN, STATS)), step=0, block=Block(0, 1))
lane.exchange(SENDER, [push], Want(step=1, wait_s=60.0), Mapping(), timeout_s=60.0)
"""


def test_a_worker_killed_in_mid_push_leaves_nothing_and_its_next_life_completes_the_step(
    ps: Ps, client: PlainClient
) -> None:
    client.start(replicas=2)
    bench = ShmBench(ps)
    gc.collect()
    before = descriptors(GRADIENTS), mappings(GRADIENTS)
    bucket = ps.store.shards[0].buckets[W]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", DYING_WORKER, ps.address], stdout=subprocess.PIPE, cwd=root, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "sent\n"
        wait_for(lambda: bucket.contributions.counted == {0}, "the bucket to be counted")
        assert len(mappings(GRADIENTS) - before[1]) == 1
        worker.kill()
    wait_for(lambda: bench.open == 0, "the attachment to be dropped")
    # What was counted is kept, and read from the dead worker's memory.
    again = bench.exchange(gradient(9.0))
    assert [ack.outcome for ack in again.acks] == [Outcome.COUNTED]
    other = Push(payloads=Whole([payload(floats([3.0] * 12))], (FROZEN, STATS)), step=0, block=Block(1, 1))
    sink = Mapping()
    done = bench.exchange(other, Want(step=1, wait_s=5.0), sink=sink)
    assert done.end is not None and done.end.outcome is Outcome.SERVED
    assert sink.weights() == tuple(value - 2 * RATE for value in FIRST_W)
    bench.close()
    wait_for(lambda: _collected() == before, "the segments to be freed")


def _collected() -> tuple[int, set[str]]:
    gc.collect()
    return descriptors(GRADIENTS), mappings(GRADIENTS)


def test_what_was_counted_and_given_up_is_not_overwritten_by_the_step_that_is_made_again() -> None:
    job = make_job("adam", model=Wide, steps=2)
    with Cluster(job, ps=1, bucket_bytes=1 << 18, lane="shm", timeouts=Timeouts(total_s=12.0)) as cluster:
        worker = cluster.worker(0)
        trainer = worker.trainer
        trainer.exchange.arm()
        trainer.locate([0], cluster.timeline)
        # The step waits for replicas 1 and 2, and then they come to this worker.
        worker.orders.still_ordered = lambda: False
        with pytest.raises(Interrupted):
            worker.step([0])
        assert {tuple(bucket.contributions.counted) for bucket in cluster.shards[0].buckets} == {(0,)}
        worker.orders.still_ordered = lambda: True
        worker.run([0, 1, 2], job.steps)
        assert_same_end(cluster.state(), reference(job))
