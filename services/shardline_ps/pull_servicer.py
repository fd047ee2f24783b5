"""Answers one pull: waits for each bucket's step and sends it as soon as it may be sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from shardline.consistency import sync
from shardline.consistency.decision import Outcome
from shardline.errors import ProtocolError
from shardline.rpc.convert import DTYPE_TO_PROTO
from shardline.rpc.v1 import data_pb2
from shardline.wire.codecs import codec_for
from shardline.wire.frames import Buffer
from shardline.wire.protobuf import ChunkView, PullFrameView
from shardline_ps.push_servicer import admit_data, outcome_to_proto
from shardline_ps.shard import Shard
from shardline_ps.store import ParameterStore, numbers

CHUNK_BYTES = 2 << 20
DEFAULT_WAIT_S = 10.0
MAX_WAIT_S = 600.0


@dataclass(frozen=True)
class Encoded:
    """One bucket as it leaves."""

    state: data_pb2.BucketState
    payload: Buffer
    raw_bytes: int


@dataclass(frozen=True)
class Want:
    """What a pull asks for. step None = whatever there is."""

    step: int | None
    at_least: bool
    have: int | None


def parse_want(request: data_pb2.PullRequest) -> Want:
    """The wanted step; raises ProtocolError for wants of later versions."""
    if request.what not in (data_pb2.PULL_WHAT_UNSPECIFIED, data_pb2.PULL_WHAT_PARAMS):
        # By number: this version may have no name for it.
        raise ProtocolError(f"pull of what = {request.what} is not offered by this ps")
    have = request.have_step if request.HasField("have_step") else None
    match request.WhichOneof("want"):
        case "exact_step":
            return Want(request.exact_step, False, have)
        case "at_least_step":
            return Want(request.at_least_step, True, have)
        case "latest":
            return Want(None, False, have)
        case other:
            raise ProtocolError(f"pull without a want this version knows ({other})")


def wanted_buckets(shard: Shard, request: data_pb2.PullRequest) -> list[int]:
    """Buckets in the order asked for, each once; raises ProtocolError where the shard hasn't got one."""
    for number in request.buckets:
        if number >= len(shard.buckets):
            raise ProtocolError(
                f"shard {shard.number} has {len(shard.buckets)} buckets, the pull names bucket {number}"
            )
    if len(set(request.buckets)) < len(request.buckets):
        raise ProtocolError(f"shard {shard.number}: the pull names a bucket twice; name each once")
    return list(request.buckets) or list(range(len(shard.buckets)))


def encode_bucket(shard: Shard, number: int, want: Want, codec_name: str) -> Encoded | Outcome:
    """Copy and encode one bucket under its lock, or say why not. Runs in the pool."""
    bucket = shard.buckets[number]
    with bucket.lock:
        if not bucket.initialized:
            return Outcome.NOT_CONFIGURED
        step = bucket.step
        if want.step is not None:
            if want.at_least:
                if step < want.step:
                    return Outcome.WAITING
            else:
                # Asynchronous buckets keep no step before the present one.
                oldest = bucket.oldest if shard.is_sync else step
                outcome = sync.serve_pull(want.step, bucket_step=step, oldest=oldest)
                if outcome is not Outcome.SERVED:
                    return outcome
                step = want.step
        state = data_pb2.BucketState(
            bucket=number,
            step=step,
            version=bucket.version,
            dtype=DTYPE_TO_PROTO[bucket.spec.dtype],
            elements=bucket.spec.elements,
        )
        if want.have is not None and bucket.changed_step <= want.have <= step:
            state.unchanged = True
            return Encoded(state, b"", 0)
        codec = codec_for(codec_name, bucket.spec)
        values = bucket.values_at(step) if shard.is_sync else bucket.values
        # bytes() is the one copy, and it is made under the lock: nobody sees a torn bucket.
        payload = bytes(codec.encode(values.cpu()))
    state.codec = codec.name
    state.payload_bytes = len(payload)
    return Encoded(state, payload, bucket.spec.nbytes)


def frames(encoded: Encoded) -> list[PullFrameView]:
    """One frame per chunk; state and first chunk share one."""
    state, payload = encoded.state, memoryview(encoded.payload)
    if not payload:
        return [PullFrameView(bucket=state)]
    return [
        PullFrameView(
            bucket=state if offset == 0 else None,
            chunk=ChunkView(state.bucket, offset, payload[offset : offset + CHUNK_BYTES]),
        )
        for offset in range(0, len(payload), CHUNK_BYTES)
    ]


def end_frame(store: ParameterStore, shard: Shard | None, outcome: Outcome, reason: str = "") -> PullFrameView:
    """The last frame of a pull."""
    end = data_pb2.PullEnd(outcome=outcome_to_proto(outcome), reason=reason, timeline=store.authority.timeline)
    if shard is not None:
        end.step, end.version = shard.step_min, shard.version
        if outcome is Outcome.WAITING:
            end.waiting_for.extend(shard.waiting_for())
    return PullFrameView(end=end)


async def pull(store: ParameterStore, request: data_pb2.PullRequest) -> AsyncIterator[PullFrameView]:
    """Frames of a pull's answer, in the order buckets become ready within the order asked for."""
    decision = admit_data(store, request.data, init=False)
    if decision.outcome is not Outcome.SERVED:
        yield end_frame(store, None, decision.outcome, decision.reason)
        return
    shard = store.shard(request.data.shard)
    want = parse_want(request)
    wanted = wanted_buckets(shard, request)
    if not 0.0 <= request.wait_s <= MAX_WAIT_S:
        raise ProtocolError(f"wait_s is {request.wait_s}; it must be between 0 and {MAX_WAIT_S:.0f} seconds")
    wait_s = request.wait_s or DEFAULT_WAIT_S
    deadline_s = time.monotonic() + wait_s
    generation = store.generation
    codec = store.configuration.codec if store.configuration is not None else "raw"
    started_s = time.monotonic()
    raw_bytes = wire_bytes = 0
    for number in wanted:
        while True:
            if generation != store.generation or request.data.timeline != store.authority.timeline:
                yield end_frame(store, shard, Outcome.WRONG_TIMELINE, "the timeline changed during this pull")
                return
            signal = store.signals[(shard.number, number)]
            waiter = signal.arm()
            encoded = await store.work(encode_bucket, shard, number, want, codec)
            if isinstance(encoded, Encoded):
                signal.disarm(waiter)
                break
            if encoded is not Outcome.WAITING:
                signal.disarm(waiter)
                reason = f"step {want.step} of bucket {number} is gone; the bucket is at {shard.buckets[number].step}"
                yield end_frame(store, shard, encoded, reason)
                return
            if shard.stop_step is not None and want.step is not None and want.step > shard.stop_step:
                signal.disarm(waiter)
                yield end_frame(store, shard, Outcome.STOPPED, f"the job stops at step {shard.stop_step}")
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not await signal.wait(waiter, left_s):
                signal.disarm(waiter)
                missing = numbers(shard.waiting_for())
                reason = f"step {want.step} lacks replicas {missing} at shard {shard.number} after {wait_s:.1f} s"
                yield end_frame(store, shard, Outcome.WAITING, reason)
                return
        raw_bytes += encoded.raw_bytes
        wire_bytes += len(encoded.payload)
        store.count(pull_raw=encoded.raw_bytes, pull_wire=len(encoded.payload))
        for frame in frames(encoded):
            yield frame
    store.on_pulled(request.data.task, codec, raw_bytes, wire_bytes, time.monotonic() - started_s)
    yield end_frame(store, shard, Outcome.SERVED)


class AsyncReply:
    """Copies of all buckets made under the shard's lock right after an asynchronous push, for the pull of that call."""

    def __init__(self, request: data_pb2.PullRequest, shard: Shard, codec: str) -> None:
        self._want = parse_want(request)
        self._numbers = wanted_buckets(shard, request)
        self._codec = codec
        self._task = request.data.task
        self.buckets: list[Encoded] = []
        self.copied = False
        """False as long as no push of this call was looked at, since it was fenced or malformed."""

    def copy(self, shard: Shard) -> None:
        """Called with the shard's lock held."""
        self.buckets, self.copied = [], True
        for number in self._numbers:
            encoded = encode_bucket(shard, number, Want(None, False, self._want.have), self._codec)
            if isinstance(encoded, Encoded):
                self.buckets.append(encoded)

    async def frames(self, store: ParameterStore, shard: Shard) -> AsyncIterator[PullFrameView]:
        """What was copied."""
        started_s = time.monotonic()
        for encoded in self.buckets:
            store.count(pull_raw=encoded.raw_bytes, pull_wire=len(encoded.payload))
            for frame in frames(encoded):
                yield frame
                # Let other calls of this loop run between large frames.
                await asyncio.sleep(0)
        raw_bytes = sum(encoded.raw_bytes for encoded in self.buckets)
        wire_bytes = sum(len(encoded.payload) for encoded in self.buckets)
        store.on_pulled(self._task, self._codec, raw_bytes, wire_bytes, time.monotonic() - started_s)
        yield end_frame(store, shard, Outcome.SERVED)
