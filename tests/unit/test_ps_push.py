"""One push stream without a network: what it holds, and what it leaves behind, however it ends."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from shardline.codecs.base import PLAIN_TURN
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, ScheduleSpec, TensorSpec
from shardline.core.tensor_bytes import borrowed_tensor
from shardline.errors import NonFiniteError, ProtocolError
from shardline.lanes.attachments import Attachments, Holder, Opening
from shardline.lanes.shm.server import ShmTicket
from shardline.rpc.v1 import common_pb2, data_pb2
from shardline.server import inline_apply as quick
from shardline.server.at_once import SingleRequests
from shardline.server.calls import OpenCalls
from shardline.server.incoming_push import PushResult
from shardline.server.pace import AHEAD, PATIENCE_S
from shardline.server.push_receiver import NoRoomError, PushReceiver
from shardline.update import rule
from shardline.wire.protobuf import ChunkView, PushFrameView, RequestView, read_push, read_reply
from shardline_ps.store import ParameterStore, PsConfiguration
from tests.support.builders import roll_back
from tests.support.lanes import no_calls

ELEMENTS = 1024
NBYTES = 4 * ELEMENTS
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


def make_store(
    mode: str = "sync",
    *,
    replicas: int = 2,
    buckets: int = 1,
    threads: int = 2,
    staging: int | None = None,
    codec: str = "raw",
) -> ParameterStore:
    """Inside a running loop: one shard with buckets of ELEMENTS float32 each, active, with values of one."""
    tensors = [TensorSpec(name=f"t{n}", shape=(ELEMENTS,), dtype="float32") for n in range(buckets)]
    store = ParameterStore(device=torch.device("cpu"), pool_threads=threads, staging_bytes=staging)
    store.staging_wait_s = 0.05
    configuration = PsConfiguration(
        job="j",
        timeline=1,
        plan=make_plan(tensors, 1, bucket_bytes=NBYTES),
        shards=(0,),
        rule=rule("SGD", ({"lr": 0.5},)),
        schedule=ScheduleSpec(),
        consistency=ConsistencySpec(mode=mode),
        replicas=replicas,
        cut_every=0,
        codec=codec,
    )
    store.configure(configuration, asyncio.get_running_loop())
    store.authority.active = True
    assert len(store.shards[0].buckets) == buckets
    for bucket in store.shards[0].buckets:
        assert bucket.spec.elements == ELEMENTS
        store.shards[0].initialize(bucket.number, torch.ones(ELEMENTS))
    return store


def head(store: ParameterStore, worker: int = 0, *, data: dict[str, Any] | None = None, **more: Any) -> PushFrameView:
    """A push's first frame: of replica `worker` where it is synchronous."""
    assert store.configuration is not None
    settings = {
        "job": "j",
        "timeline": 1,
        "plan_id": store.configuration.plan.plan_id,
        "task": f"worker/{worker}",
        "incarnation": 1,
    }
    header = data_pb2.PushHeader(
        data=common_pb2.DataHeader(**{**settings, **(data or {})}),
        block=data_pb2.Block(first=worker, count=1),
        codec=store.configuration.codec,
        **more,
    )
    return PushFrameView(header=header)


def bucket_head(store: ParameterStore, number: int) -> data_pb2.BucketHeader:
    return data_pb2.BucketHeader(
        bucket=number, dtype=common_pb2.DTYPE_FLOAT32, elements=ELEMENTS, payload_bytes=len(encoded(store, number))
    )


def encoded(store: ParameterStore, number: int) -> bytes:
    """A gradient of ones."""
    assert store.configuration is not None
    return bytes(store.coding.push.bucket(0, number).encoder.encode(torch.ones(ELEMENTS), PLAIN_TURN))


def bucket_frame(store: ParameterStore, number: int) -> PushFrameView:
    """A whole bucket in one frame."""
    raw = encoded(store, number)
    return PushFrameView(
        bucket=bucket_head(store, number),
        chunk=ChunkView(number, 0, memoryview(raw)),
        bucket_commit=data_pb2.BucketCommit(bucket=number, bytes=len(raw), chunks=1),
    )


def push_frames(store: ParameterStore, worker: int = 0, **more: Any) -> Iterator[PushFrameView]:
    yield head(store, worker, **more)
    for bucket in store.shards[0].buckets:
        yield bucket_frame(store, bucket.number)
    yield PushFrameView(commit=data_pb2.Commit(buckets=len(store.shards[0].buckets)))


async def push(store: ParameterStore, frames: Iterator[PushFrameView]) -> PushResult | None:
    """A stream of its own for these frames; the result of the last."""
    receiver = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
    result = None
    try:
        for frame in frames:
            result = await receiver.feed(frame)
    finally:
        await receiver.abandon()
    return result


async def nothing_is_left(store: ParameterStore) -> None:
    """Leases that threads gave back are taken by the loop soon."""
    for _ in range(200):
        if not store.staging.leased and not store.staging.ledger.entries:
            break
        await asyncio.sleep(0.01)
    assert store.staging.leased == 0 and store.staging.ledger.entries == []


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30.0))


# Room is given back


def test_a_push_refused_at_its_commit_gives_its_room_back_and_the_next_one_comes_in() -> None:
    async def main() -> None:
        store = make_store("async", buckets=2, staging=2 * NBYTES)
        for _ in range(3):
            with pytest.raises(ProtocolError, match="base version 1000000 is ahead of the shard"):
                await push(store, push_frames(store, seq=1, base_max=10**6))
            await nothing_is_left(store)
        result = await push(store, push_frames(store, seq=1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_APPLIED
        await nothing_is_left(store)
        store.close()

    run(main)


def test_a_synchronous_push_that_lacks_a_bucket_gives_its_room_back() -> None:
    async def main() -> None:
        store = make_store(buckets=2)
        frames = [frame for n, frame in enumerate(push_frames(store)) if n != 2]
        with pytest.raises(ProtocolError, match=r"the push lacks buckets \[1\]"):
            await push(store, iter(frames))
        await nothing_is_left(store)
        store.close()

    run(main)


def test_partial_pushes_of_one_replica_count_bucket_by_bucket() -> None:
    async def main() -> None:
        store = make_store(buckets=3, replicas=1)
        shard = store.shards[0]

        def part(*numbers: int) -> Iterator[PushFrameView]:
            yield head(store, partial=True)
            yield from (bucket_frame(store, number) for number in numbers)
            yield PushFrameView(commit=data_pb2.Commit(buckets=len(numbers)))

        result = await push(store, part(1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_COUNTED
        assert [bucket.step for bucket in shard.buckets] == [0, 1, 0]
        # Its replica still has to contribute the rest.
        assert shard.progress(0) == 0
        result = await push(store, part(1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_DUPLICATE
        await push(store, part(0, 2))
        assert [bucket.step for bucket in shard.buckets] == [1, 1, 1] and shard.progress(0) == 1
        with pytest.raises(ProtocolError, match="the partial push names no bucket"):
            await push(store, part())
        await nothing_is_left(store)
        store.close()

    run(main)


def test_a_call_cancelled_while_its_buckets_wait_for_the_pool_gives_their_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick, "QUICK_BYTES", 0)

    async def main() -> None:
        store = make_store(buckets=2, threads=1)
        gate, asked = threading.Event(), asyncio.Event()
        # The pool is busy with others' buckets.
        store.pool.submit(gate.wait, 20.0)

        def watched() -> Iterator[PushFrameView]:
            for frame in push_frames(store):
                if frame.commit is not None:
                    asked.set()
                yield frame

        task = asyncio.create_task(push(store, watched()))
        await asked.wait()
        assert store.staging.in_use > 0
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_is_left(store)
        store.close()

    run(main)


def test_a_small_bucket_is_counted_without_the_pool() -> None:
    async def main() -> None:
        store = make_store(replicas=1, buckets=2, threads=1)
        gate = threading.Event()
        store.pool.submit(gate.wait, 20.0)
        result = await asyncio.wait_for(push(store, push_frames(store)), 5.0)
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_COUNTED
        assert [bucket.step for bucket in store.shards[0].buckets] == [1, 1]
        await nothing_is_left(store)
        gate.set()
        store.close()

    run(main)


def test_a_small_bucket_that_somebody_is_at_holds_up_no_other_call() -> None:
    async def main() -> None:
        store = make_store(replicas=1, threads=1)
        bucket = store.shards[0].buckets[0]
        with bucket.lock:
            task = asyncio.create_task(push(store, push_frames(store)))
            # The loop runs on, and the push waits in the pool.
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert not task.done() and bucket.step == 0
        result = await asyncio.wait_for(task, 5.0)
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_COUNTED
        await nothing_is_left(store)
        store.close()

    run(main)


def test_the_error_of_one_bucket_keeps_no_other_ones_room() -> None:
    async def main() -> None:
        store = make_store(buckets=3, threads=1)
        frames = list(push_frames(store))
        bad = bucket_frame(store, 1)
        assert bad.bucket_commit is not None
        bad.bucket_commit.digest = 12345
        with pytest.raises(ProtocolError, match="bucket 1: the digest of the received bytes differs"):
            await push(store, iter([*frames[:2], bad, *frames[3:]]))
        await nothing_is_left(store)
        store.close()

    run(main)


# Asynchronous pushes


def test_a_push_that_is_still_being_computed_holds_what_has_come_and_others_pass_it() -> None:
    async def main() -> None:
        # Room for one and a half: two would not fit whole.
        store = make_store("async", buckets=2, staging=3 * NBYTES)
        slow = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
        frames = push_frames(store, 0, seq=1)
        await slow.feed(next(frames))
        assert store.staging.in_use == 0
        await slow.feed(next(frames))
        for seq in range(1, 4):
            result = await push(store, push_frames(store, 1, seq=seq))
            assert result is not None and result.ack.outcome == common_pb2.OUTCOME_APPLIED
            assert store.staging.in_use == NBYTES
        for frame in frames:
            result = await slow.feed(frame)
        assert result is not None and (result.ack.outcome, result.ack.version) == (common_pb2.OUTCOME_APPLIED, 4)
        await nothing_is_left(store)
        store.close()

    run(main)


def test_a_push_that_finds_no_room_among_others_is_told_to_come_again() -> None:
    async def main() -> None:
        store = make_store("async", buckets=2, staging=2 * NBYTES)
        slow = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
        frames = push_frames(store, 0, seq=1)
        for _ in range(2):
            await slow.feed(next(frames))
        with pytest.raises(
            NoRoomError, match="shard 0, a push of 8,192 bytes in all: no room for 4,096 bytes"
        ) as caught:
            await push(store, push_frames(store, 1, seq=1))
        assert caught.value.result.ack.outcome == common_pb2.OUTCOME_WAITING
        assert "Unfinished pushes of other workers use it" in str(caught.value)
        await slow.abandon()
        result = await push(store, push_frames(store, 1, seq=1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_APPLIED
        await nothing_is_left(store)
        store.close()

    run(main)


def test_a_push_whose_call_ends_while_it_is_applied_is_applied_to_every_bucket() -> None:
    async def main() -> None:
        store = make_store("async", buckets=3)
        shard, loop = store.shards[0], asyncio.get_running_loop()
        applied, begun, gate = shard.storage.apply_now, asyncio.Event(), threading.Event()

        def slowly(bucket: Any, *args: Any, **more: Any) -> None:
            applied(bucket, *args, **more)
            loop.call_soon_threadsafe(begun.set)
            assert gate.wait(20.0)

        shard.storage.apply_now = slowly  # type: ignore[assignment, method-assign]
        task = asyncio.create_task(push(store, push_frames(store, seq=1)))
        await begun.wait()
        # Its worker's deadline has passed, say: it sends this push again and is told that it counts.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.staging.in_use == 3 * NBYTES
        gate.set()
        result = await push(store, push_frames(store, seq=1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_DUPLICATE
        for bucket in shard.buckets:
            assert torch.equal(bucket.values, torch.full((ELEMENTS,), 0.5))
        await nothing_is_left(store)
        store.close()

    run(main)


class Segment:
    """A worker's memory, as lane shm has it."""

    lane = "shm"
    borrowed = True
    window = 1 << 30

    def __init__(self, holder: Holder, memory: bytes) -> None:
        self.holder = holder
        self._memory = memoryview(memory)

    def expect(self, offset: int, nbytes: int, digest: int) -> ShmTicket:
        memory = self._memory[offset : offset + nbytes]
        return ShmTicket(memory, borrowed_tensor(memory, "uint8"))

    def published(self, bucket: int, step: int) -> None:
        raise AssertionError("nothing is pulled here")

    def reply_slot(self, bucket: int, nbytes: int) -> None:
        raise AssertionError("nothing is pulled here")

    async def send(self, payload: Any, intact: Any) -> None:
        raise AssertionError("nothing is pulled here")

    def abort(self, reason: str) -> None:
        """There is nothing to end."""

    close = functools.partialmethod(abort, "closed")


class SegmentOffer:
    lane = "shm"

    def __init__(self, memory: bytes) -> None:
        self._memory = memory

    def open(self, holder: Holder, shard: Any, loop: Any, answer: Any) -> Opening:
        return Opening(attachment=Segment(holder, self._memory))

    def close(self) -> None:
        """Nobody comes."""


def test_first_values_wait_for_room_until_those_before_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "QUICK_BYTES", 0)

    async def main() -> None:
        store = make_store(replicas=1, buckets=3, threads=1, staging=NBYTES)
        gate = threading.Event()
        blocked = store.pool.submit(gate.wait, 20.0)
        receiver = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
        await receiver.feed(head(store, kind=data_pb2.PUSH_KIND_INIT))
        await receiver.feed(bucket_frame(store, 0))
        assert store.staging.in_use == NBYTES
        with pytest.raises(NoRoomError, match="shard 0, a push: no room for 4,096 bytes"):
            await receiver.feed(bucket_frame(store, 1))
        gate.set()
        assert blocked.result(20.0)
        await receiver.abandon()
        result = await push(store, push_frames(store, kind=data_pb2.PUSH_KIND_INIT))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_DUPLICATE
        assert store.staging.peak == NBYTES
        await nothing_is_left(store)
        store.close()

    run(main)


class Wire(Segment):
    """Bulk sockets on which everything comes at once that is expected."""

    lane = "tcp"
    borrowed = False
    window = 8
    expected = 0

    def expect(self, offset: int, nbytes: int, digest: int) -> ShmTicket:
        self.expected += 1
        return super().expect(offset, nbytes, digest)


class WireOffer(SegmentOffer):
    lane = "tcp"

    def open(self, holder: Holder, shard: Any, loop: Any, answer: Any) -> Opening:
        return Opening(attachment=Wire(holder, self._memory))


@pytest.mark.parametrize("partial", [False, True])
def test_a_push_ahead_of_another_of_its_step_is_received_when_that_one_has_moved_or_has_not_for_long(
    partial: bool,
) -> None:
    async def main() -> None:
        store = make_store(buckets=6)
        pace, now_s = store.staging.pace, 0.0
        pace.clock = lambda: now_s
        attachments, wires, receivers = Attachments(), [], []
        attachments.offer(WireOffer(encoded(store, 0)))
        for worker in range(2):
            holder = Holder(task=f"worker/{worker}", incarnation=1, shard=0)
            number, opening = attachments.open("tcp", holder, store.shards[0], asyncio.get_running_loop(), no_calls)
            assert isinstance(opening.attachment, Wire)
            receiver = PushReceiver(store, attachments, spawn=asyncio.create_task)
            data = {"lane": common_pb2.LANE_TCP, "attachment": number}
            await receiver.feed(head(store, worker, data=data, partial=partial))
            wires.append(opening.attachment)
            receivers.append(receiver)

        async def refer(worker: int, *buckets: int) -> int:
            """Refer to buckets, all of whose bytes are there; how many of the first worker's are expected then."""
            refs = [data_pb2.BucketRef(bucket=bucket_head(store, bucket)) for bucket in buckets]
            await receivers[worker].feed(PushFrameView(refs=refs))
            for _ in range(20):
                await asyncio.sleep(0)
            return wires[0].expected

        await refer(1, 0)
        assert await refer(0, *range(6)) == (6 if partial else 1 + AHEAD)
        assert await refer(1, 1) == (6 if partial else 2 + AHEAD)
        now_s += PATIENCE_S
        assert await refer(1) == (6 if partial else 2 + AHEAD)
        pace.changed()
        assert await refer(1) == 6
        for receiver in receivers:
            await receiver.abandon()
        await nothing_is_left(store)
        store.close()

    run(main)


@pytest.mark.parametrize("fresh", [True, False])
def test_no_more_first_values_are_on_their_way_than_there_is_room_for(fresh: bool) -> None:
    async def main() -> None:
        store = make_store(replicas=1, buckets=5, threads=1, staging=2 * NBYTES)
        store.staging_wait_s = 20.0
        for bucket in store.shards[0].buckets:
            bucket.initialized = not fresh
        gate = threading.Event()
        blocked = store.pool.submit(gate.wait, 20.0)
        attachments = Attachments()
        attachments.offer(WireOffer(encoded(store, 0)))
        holder = Holder(task="worker/0", incarnation=1, shard=0)
        number, opening = attachments.open("tcp", holder, store.shards[0], asyncio.get_running_loop(), no_calls)
        assert isinstance(opening.attachment, Wire)
        receiver = PushReceiver(store, attachments, spawn=asyncio.create_task)
        data = {"lane": common_pb2.LANE_TCP, "attachment": number}
        await receiver.feed(head(store, data=data, kind=data_pb2.PUSH_KIND_INIT))
        refs = [data_pb2.BucketRef(bucket=bucket_head(store, bucket)) for bucket in range(5)]
        await receiver.feed(PushFrameView(refs=refs))
        while not store.staging.waiting:
            await asyncio.sleep(0)
        assert opening.attachment.expected == 2 and store.staging.in_use == 2 * NBYTES
        gate.set()
        assert blocked.result(20.0)
        given_back = store.heap_trimmer.given_back
        result = await receiver.feed(PushFrameView(commit=data_pb2.Commit(buckets=5)))
        assert result is not None
        assert result.ack.outcome == (common_pb2.OUTCOME_COUNTED if fresh else common_pb2.OUTCOME_DUPLICATE)
        assert opening.attachment.expected == 5 and store.staging.peak == 2 * NBYTES
        # What brought first values goes back to the system, where its allocator can.
        assert store.heap_trimmer.given_back - given_back == (fresh and store.heap_trimmer.known)
        await nothing_is_left(store)
        store.close()

    run(main)


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(("codec", "held"), [("raw", 0), ("bf16", NBYTES)])
def test_what_is_decoded_from_a_workers_memory_is_counted_and_what_is_read_there_is_not(
    monkeypatch: pytest.MonkeyPatch, mode: str, codec: str, held: int
) -> None:
    monkeypatch.setattr(quick, "QUICK_BYTES", 0)

    async def main() -> None:
        store = make_store(mode, replicas=1, buckets=2, codec=codec)
        raw = encoded(store, 0)
        attachments = Attachments()
        attachments.offer(SegmentOffer(raw))
        holder = Holder(task="worker/0", incarnation=1, shard=0)
        number, _ = attachments.open("shm", holder, store.shards[0], asyncio.get_running_loop(), no_calls)
        receiver = PushReceiver(store, attachments, spawn=asyncio.create_task)
        await receiver.feed(head(store, data={"lane": common_pb2.LANE_SHM, "attachment": number}, seq=1))
        refs = [data_pb2.BucketRef(bucket=bucket_head(store, bucket)) for bucket in range(2)]
        await receiver.feed(PushFrameView(refs=refs))
        pushed = receiver._push  # no other way: its tasks are under way before the push has an answer
        assert pushed is not None
        while not pushed.running:
            await asyncio.sleep(0)
        await asyncio.gather(*pushed.running)
        if mode == "async":
            assert store.staging.leased == 2 * held
        result = await receiver.feed(PushFrameView(commit=data_pb2.Commit(buckets=2)))
        assert result is not None
        assert result.ack.outcome == (common_pb2.OUTCOME_APPLIED if mode == "async" else common_pb2.OUTCOME_COUNTED)
        assert store.staging.peak == 2 * held
        await nothing_is_left(store)
        store.close()

    run(main)


# What a message keeps alive


class Message(bytearray):
    """One that can be looked for."""


def padded(frame: bytes, padding: int) -> Message:
    """A frame with a field that nobody knows, of this many bytes."""
    assert 1 << 14 <= padding < 1 << 21
    size = bytes((padding & 0x7F | 0x80, padding >> 7 & 0x7F | 0x80, padding >> 14))
    return Message(frame + b"\x7a" + size + bytes(padding))


@pytest.mark.parametrize("chunks", [1, 2, 32])
def test_a_contribution_keeps_no_more_memory_alive_than_its_bucket_has(chunks: int) -> None:
    async def main() -> None:
        store = make_store()
        receiver = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
        await receiver.feed(head(store))
        await receiver.feed(PushFrameView(bucket=bucket_head(store, 0)))
        raw, size = encoded(store, 0), NBYTES // chunks
        messages = []
        for offset in range(0, NBYTES, size):
            chunk = data_pb2.Chunk(bucket=0, offset=offset, payload=raw[offset : offset + size])
            message = padded(data_pb2.PushFrame(chunk=chunk).SerializeToString(), 1 << 20)
            messages.append(weakref.ref(message))
            await receiver.feed(read_push(memoryview(message)))
            del message
        gc.collect()
        assert sum(message() is not None for message in messages) == 0
        end = data_pb2.BucketCommit(bucket=0, bytes=NBYTES, chunks=chunks)
        await receiver.feed(PushFrameView(bucket_commit=end))
        result = await receiver.feed(PushFrameView(commit=data_pb2.Commit(buckets=1)))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_COUNTED
        assert store.shards[0].partial_bytes == NBYTES
        gc.collect()
        assert sum(message() is not None for message in messages) == 0
        await push(store, push_frames(store, 1))
        assert torch.equal(store.shards[0].buckets[0].values, torch.full((ELEMENTS,), 0.5))
        store.close()

    run(main)


def test_a_message_that_is_little_more_than_its_payload_is_used_where_it_lies() -> None:
    async def main() -> None:
        store = make_store()
        frame = bucket_frame(store, 0)
        message = Message(data_pb2.PushFrame(chunk=data_pb2.Chunk(payload=encoded(store, 0))).SerializeToString())
        frame.chunk = read_push(memoryview(message)).chunk
        alive = weakref.ref(message)
        del message
        await push(store, iter([head(store), frame, PushFrameView(commit=data_pb2.Commit(buckets=1))]))
        del frame
        gc.collect()
        assert alive() is not None
        roll_back(store.shards[0])
        gc.collect()
        assert alive() is None
        store.close()

    run(main)


@pytest.mark.parametrize("at", [0, NBYTES])
def test_a_chunk_without_bytes_is_refused_for_it_could_be_sent_for_ever(at: int) -> None:
    async def main() -> None:
        store = make_store()
        receiver = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
        await receiver.feed(head(store))
        first = PushFrameView(bucket=bucket_head(store, 0))
        if at:
            first.chunk = ChunkView(0, 0, memoryview(encoded(store, 0)))
        await receiver.feed(first)
        with pytest.raises(ProtocolError, match="bucket 0: an empty chunk in a bucket that is not empty"):
            await receiver.feed(PushFrameView(chunk=ChunkView(0, at, memoryview(b""))))
        await receiver.abandon()
        await nothing_is_left(store)
        store.close()

    run(main)


# Steps in one request


class Published(Segment):
    def published(self, bucket: int, step: int) -> tuple[int, int]:  # type: ignore[override]
        return step & 1, bucket * NBYTES


class PublishedOffer(SegmentOffer):
    def open(self, holder: Holder, shard: Any, loop: Any, answer: Any) -> Opening:
        return Opening(attachment=Published(holder, self._memory))


class Steps:
    """Workers that push a step of one bucket in place and pull the next, each in one request."""

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        self.attachments = Attachments()
        self.attachments.offer(PublishedOffer(encoded(store, 0)))
        self.calls, self.results = OpenCalls(), list[PushResult]()
        self.single = SingleRequests(store, self.attachments, self.calls, self.results.append)
        self.written: list[bytes] = []

    def request(self, worker: int, step: int = 0) -> RequestView:
        holder = Holder(task=f"worker/{worker}", incarnation=1, shard=0)
        shard: Any = self.store.shards[0]
        number, _ = self.attachments.open("shm", holder, shard, asyncio.get_running_loop(), no_calls)
        frame = head(self.store, worker, data={"lane": common_pb2.LANE_SHM, "attachment": number}, step=step)
        frame.refs = [data_pb2.BucketRef(bucket=bucket_head(self.store, 0))]
        frame.commit = data_pb2.Commit(buckets=1, bytes=NBYTES)
        assert frame.header is not None
        pull = data_pb2.PullRequest(data=frame.header.data, exact_step=step + 1, wait_s=20.0)
        return RequestView(push=frame, pull=pull)

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """There is none."""


def told(messages: list[bytes]) -> tuple[list[int], list[int]]:
    """(outcomes of acks, steps of the buckets that were served) in these replies."""
    views = [read_reply(message) for message in messages]
    acks = [view.ack.outcome for view in views if view.ack is not None]
    return acks, [state.step for view in views if view.pull is not None for state in view.pull.buckets]


def test_a_small_step_is_answered_at_once_in_one_message() -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=1))
        answered = steps.single.answer(steps.request(0))
        assert answered is not None and answered.rest is None and len(answered.replies) == 1
        assert told(answered.replies) == ([common_pb2.OUTCOME_COUNTED], [1])
        assert [result.task for result in steps.results] == ["worker/0"]
        assert torch.equal(steps.store.shards[0].buckets[0].values, torch.full((ELEMENTS,), 0.5))
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_small_step_that_waits_for_others_is_acknowledged_at_once_and_served_when_they_came() -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=2))
        first = steps.single.answer(steps.request(0))
        assert first is not None and first.rest is not None
        assert told(first.replies) == ([common_pb2.OUTCOME_COUNTED], [])
        waiting = asyncio.create_task(first.rest(steps))
        await asyncio.sleep(0)
        assert [call.senders for call in steps.calls.open] == [{("worker/0", 1)}], "a fence can end it"
        last = steps.single.answer(steps.request(1))
        assert last is not None and last.rest is None
        assert told(last.replies) == ([common_pb2.OUTCOME_COUNTED], [1])
        await waiting
        assert told(steps.written) == ([], [1]) and not steps.calls.open
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_step_that_threads_count_waits_in_a_task_and_is_answered_in_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=1))
        monkeypatch.setattr(quick, "QUICK_BYTES", NBYTES - 1)
        answered = steps.single.answer(steps.request(0))
        assert answered is not None and answered.replies == [] and answered.rest is not None
        await answered.rest(steps)
        assert len(steps.written) == 1 and told(steps.written) == ([common_pb2.OUTCOME_COUNTED], [1])
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


@pytest.mark.parametrize("patience_s", [0.0, 0.05])
def test_a_step_in_one_request_that_finds_no_room_is_told_to_wait_and_pulls_nothing(patience_s: float) -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=4))
        staging = steps.store.staging
        staging.ledger.limit, steps.store.staging_wait_s = staging.ledger.reserved, patience_s
        answered = steps.single.answer(steps.request(3))
        assert answered is not None
        if answered.rest is not None:
            await answered.rest(steps)
        assert told([*answered.replies, *steps.written]) == ([common_pb2.OUTCOME_WAITING], [])
        assert [result.task for result in steps.results] == ["worker/3"] and not steps.calls.open
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_step_whose_wait_is_cancelled_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=2, threads=1))
        monkeypatch.setattr(quick, "QUICK_BYTES", NBYTES - 1)
        gate = threading.Event()
        blocked = steps.store.pool.submit(gate.wait, 20.0)
        answered = steps.single.answer(steps.request(0))
        assert answered is not None and answered.rest is not None
        task = asyncio.create_task(answered.rest(steps))
        await asyncio.sleep(0.01)
        assert not steps.written
        task.cancel()
        await asyncio.sleep(0.01)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert blocked.result(20.0) and not steps.calls.open
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


def test_a_step_with_nan_ends_its_attachment() -> None:
    async def main() -> None:
        steps = Steps(make_store(replicas=1))
        steps.attachments.offer(PublishedOffer(torch.full((ELEMENTS,), math.nan).numpy().tobytes()))
        with pytest.raises(NonFiniteError, match="t0"):
            steps.single.answer(steps.request(0))
        assert steps.attachments.count() == {"shm": 0}
        assert torch.equal(steps.store.shards[0].buckets[0].values, torch.ones(ELEMENTS))
        await nothing_is_left(steps.store)
        steps.store.close()

    run(main)


@pytest.mark.parametrize("change", ["several requests", "asynchronous", "first values"])
def test_what_is_no_step_in_one_request_is_left_alone(change: str) -> None:
    async def main() -> None:
        steps = Steps(make_store("async" if change == "asynchronous" else "sync", replicas=1))
        request = steps.request(0)
        assert request.push is not None and request.push.header is not None
        if change == "several requests":
            request.push.commit = None
        elif change == "first values":
            request.push.header.kind = data_pb2.PUSH_KIND_INIT
        assert steps.single.answer(request) is None
        assert not steps.results and steps.attachments.count() == {"shm": 1}
        steps.store.close()

    run(main)
