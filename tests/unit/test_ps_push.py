"""One push stream without a network: what it holds, and what it leaves behind, however it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from shardline.errors import ProtocolError
from shardline.lanes.attachments import Attachments, Holder, Opening
from shardline.lanes.shm.server import ShmTicket
from shardline.rpc.v1 import common_pb2, data_pb2
from shardline.server import incoming_push as quick
from shardline.server.pace import AHEAD, PATIENCE_S
from shardline.server.push_receiver import NoRoomError, PushReceiver
from tests.support.lanes import no_calls
from tests.support.pushes import (
    ELEMENTS,
    NBYTES,
    Segment,
    SegmentOffer,
    bucket_frame,
    bucket_head,
    encoded,
    head,
    make_store,
    nothing_is_left,
    push,
    push_frames,
    run,
)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


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

        def part(*numbers: int) -> Iterator[data_pb2.PushFrame]:
            yield head(store, partial=True)
            yield from (bucket_frame(store, number) for number in numbers)
            yield data_pb2.PushFrame(commit=data_pb2.Commit(buckets=len(numbers)))

        result = await push(store, part(1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_COUNTED
        assert [bucket.step for bucket in shard.buckets] == [0, 1, 0]
        # Its replica still has to contribute the rest.
        assert shard.mode.progress(0) == 0
        result = await push(store, part(1))
        assert result is not None and result.ack.outcome == common_pb2.OUTCOME_DUPLICATE
        await push(store, part(0, 2))
        assert [bucket.step for bucket in shard.buckets] == [1, 1, 1] and shard.mode.progress(0) == 1
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

        def watched() -> Iterator[data_pb2.PushFrame]:
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
        pace, now_s = store.pace, 0.0
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
            await receivers[worker].feed(data_pb2.PushFrame(refs=refs))
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
        await receiver.feed(data_pb2.PushFrame(refs=refs))
        while not store.staging.waiting:
            await asyncio.sleep(0)
        assert opening.attachment.expected == 2 and store.staging.in_use == 2 * NBYTES
        gate.set()
        assert blocked.result(20.0)
        given_back = store.heap_trimmer.given_back
        result = await receiver.feed(data_pb2.PushFrame(commit=data_pb2.Commit(buckets=5)))
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
        await receiver.feed(data_pb2.PushFrame(refs=refs))
        pushed = receiver._push  # no other way: its tasks are under way before the push has an answer
        assert pushed is not None
        while not pushed.running:
            await asyncio.sleep(0)
        await asyncio.gather(*pushed.running)
        if mode == "async":
            assert store.staging.leased == 2 * held
        result = await receiver.feed(data_pb2.PushFrame(commit=data_pb2.Commit(buckets=2)))
        assert result is not None
        assert result.ack.outcome == (common_pb2.OUTCOME_APPLIED if mode == "async" else common_pb2.OUTCOME_COUNTED)
        assert store.staging.peak == 2 * held
        await nothing_is_left(store)
        store.close()

    run(main)


@pytest.mark.parametrize("at", [0, NBYTES])
def test_a_chunk_without_bytes_is_refused_for_it_could_be_sent_for_ever(at: int) -> None:
    async def main() -> None:
        store = make_store()
        receiver = PushReceiver(store, Attachments(), spawn=asyncio.create_task)
        await receiver.feed(head(store))
        first = data_pb2.PushFrame(bucket=bucket_head(store, 0))
        if at:
            first.chunk.CopyFrom(data_pb2.Chunk(bucket=0, offset=0, payload=encoded(store, 0)))
        await receiver.feed(first)
        with pytest.raises(ProtocolError, match="bucket 0: an empty chunk in a bucket that is not empty"):
            await receiver.feed(data_pb2.PushFrame(chunk=data_pb2.Chunk(bucket=0, offset=at, payload=b"")))
        await receiver.abandon()
        await nothing_is_left(store)
        store.close()

    run(main)
