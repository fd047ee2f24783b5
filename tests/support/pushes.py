"""Pushes to a store without a network: frames, and the memory of a lane that has them in place."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch

from shardline.codecs.base import PLAIN_TURN
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, ScheduleSpec, TensorSpec
from shardline.core.tensor_bytes import borrowed_tensor
from shardline.lanes.attachments import Attachments, Holder, Opening
from shardline.lanes.shm.server import ShmTicket
from shardline.rpc.v1 import common_pb2, data_pb2
from shardline.server.incoming_push import PushResult
from shardline.server.push_receiver import PushReceiver
from shardline.update import rule
from shardline_ps.store import ParameterStore, PsConfiguration

ELEMENTS = 1024
NBYTES = 4 * ELEMENTS


def configure(store: ParameterStore, configuration: PsConfiguration, loop: asyncio.AbstractEventLoop) -> bool:
    """Configure a store that no calls use, in one turn of its loop; False if that is in force already."""
    change = store.check(configuration)
    if change is None:
        return False
    store.let_go(change, loop)
    store.make(change, loop)
    return True


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
    configure(store, configuration, asyncio.get_running_loop())
    store.authority.active = True
    assert len(store.shards[0].buckets) == buckets
    for bucket in store.shards[0].buckets:
        assert bucket.spec.elements == ELEMENTS
        store.shards[0].initialize(bucket.number, torch.ones(ELEMENTS))
    return store


def head(
    store: ParameterStore, worker: int = 0, *, data: dict[str, Any] | None = None, **more: Any
) -> data_pb2.PushFrame:
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
    return data_pb2.PushFrame(header=header)


def bucket_head(store: ParameterStore, number: int) -> data_pb2.BucketHeader:
    return data_pb2.BucketHeader(
        bucket=number, dtype=common_pb2.DTYPE_FLOAT32, elements=ELEMENTS, payload_bytes=len(encoded(store, number))
    )


def encoded(store: ParameterStore, number: int) -> bytes:
    """A gradient of ones."""
    assert store.configuration is not None
    return bytes(store.coding.push.bucket(0, number).coder.encode(torch.ones(ELEMENTS), PLAIN_TURN))


def bucket_frame(store: ParameterStore, number: int) -> data_pb2.PushFrame:
    """A whole bucket in one frame."""
    raw = encoded(store, number)
    return data_pb2.PushFrame(
        bucket=bucket_head(store, number),
        chunk=data_pb2.Chunk(bucket=number, offset=0, payload=raw),
        bucket_commit=data_pb2.BucketCommit(bucket=number, bytes=len(raw), chunks=1),
    )


def push_frames(store: ParameterStore, worker: int = 0, **more: Any) -> Iterator[data_pb2.PushFrame]:
    yield head(store, worker, **more)
    for bucket in store.shards[0].buckets:
        yield bucket_frame(store, bucket.number)
    yield data_pb2.PushFrame(commit=data_pb2.Commit(buckets=len(store.shards[0].buckets)))


async def push(store: ParameterStore, frames: Iterator[data_pb2.PushFrame]) -> PushResult | None:
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
