"""The hand-written reader of frames beside the generated one: what both take they take alike, else ours refuses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from shardline.errors import ProtocolError
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2
from shardline.wire.protobuf import (
    ChunkView,
    PullFrameView,
    PushFrameView,
    ReplyView,
    RequestView,
    read_reply,
    read_request,
    varint,
    write_push,
)
from tests.support import plain_client

BASE_S, PER_BYTE_S = 0.1, 10e-6
"""Processor time that a frame may take: a fixed part, for whoever else runs in the process, and so much per byte."""
TRIES = 3
"""Slow is what is slow each time: a collection of garbage, 0.1 s where the heap is large, falls into one try."""


class Disagreement(AssertionError):
    """The two readers differ, or one took too long."""


@dataclass(frozen=True)
class Kind:
    """One message with tensor bytes in it, and how the generated reader's result is compared."""

    name: str
    generated: Any
    ours: Callable[[bytes], RequestView | ReplyView]
    same: Callable[[Any, Any], Iterable[str]]


def check(kind: Kind, data: bytes) -> bool:
    """Read `data` both ways; returns whether it was taken. Raises Disagreement."""
    ours, took_s = _read(kind, data)
    for _ in range(TRIES - 1):
        if took_s <= BASE_S + PER_BYTE_S * len(data):
            break
        took_s = min(took_s, _read(kind, data)[1])
    if took_s > BASE_S + PER_BYTE_S * len(data):
        raise Disagreement(f"{kind.name} of {len(data)} bytes took {took_s:.3f} s of processor time to read")
    if ours.error is not None:
        if type(ours.error) is not ProtocolError or len(str(ours.error)) < 10:
            raise Disagreement(f"{kind.name} is refused with {ours.error!r}, which is no sentence")
        return False
    try:
        theirs = kind.generated.FromString(data)
    except DecodeError as error:
        raise Disagreement(f"{kind.name} is read, and generated code refuses it: {error}") from None
    differences = list(kind.same(ours, theirs))
    if differences:
        raise Disagreement(f"{kind.name} is read in another way than by generated code: {', '.join(differences)}")
    return True


def _read(kind: Kind, data: bytes) -> tuple[RequestView | ReplyView, float]:
    began_s = time.thread_time()
    ours = kind.ours(data)
    return ours, time.thread_time() - began_s


def _part(name: str, ours: Any, holder: Any) -> Iterable[str]:
    if (ours is not None) != holder.HasField(name):
        yield f"{name} is there for one of the two"
    elif ours is not None and _bytes(ours) != _bytes(getattr(holder, name)):
        yield name


def _bytes(message: Any) -> bytes:
    # Not compared by ==, for which NaN differs from itself.
    found: bytes = message.SerializeToString(deterministic=True)
    return found


def _parts(name: str, ours: Iterable[Any], theirs: Iterable[Any]) -> Iterable[str]:
    if [_bytes(item) for item in ours] != [_bytes(item) for item in theirs]:
        yield name


def _chunk(ours: ChunkView | None, holder: Any) -> Iterable[str]:
    if (ours is not None) != holder.HasField("chunk"):
        yield "chunk is there for one of the two"
    elif ours is not None:
        chunk = holder.chunk
        for name in ("bucket", "offset"):
            if getattr(ours, name) != getattr(chunk, name):
                yield f"chunk.{name}: {getattr(ours, name)} here, {getattr(chunk, name)} there"
        if bytes(ours.payload) != chunk.payload:
            yield "chunk.payload"


def _push(ours: PushFrameView | None, holder: Any, name: str) -> Iterable[str]:
    if (ours is not None) != holder.HasField(name):
        yield f"{name} is there for one of the two"
    elif ours is not None:
        frame = getattr(holder, name)
        for part in ("header", "bucket", "bucket_commit", "commit"):
            yield from _part(part, getattr(ours, part), frame)
        yield from _chunk(ours.chunk, frame)
        yield from _parts("refs", ours.refs, frame.refs)


def _pull(ours: PullFrameView | None, holder: Any) -> Iterable[str]:
    if (ours is not None) != holder.HasField("pull"):
        yield "pull is there for one of the two"
    elif ours is not None:
        for part in ("bucket", "end"):
            yield from _part(part, getattr(ours, part), holder.pull)
        yield from _chunk(ours.chunk, holder.pull)
        yield from _parts("buckets", ours.buckets, holder.pull.buckets)


def _same_push_pull(ours: RequestView, theirs: Any) -> Iterable[str]:
    yield from _push(ours.push, theirs, "push")
    yield from _part("pull", ours.pull, theirs)


def _same_reply(ours: ReplyView, theirs: Any) -> Iterable[str]:
    yield from _part("ack", ours.ack, theirs)
    yield from _pull(ours.pull, theirs)


KINDS = (
    Kind(
        "PushRequest",
        parameter_server_pb2.PushRequest,
        read_request,
        lambda ours, theirs: _push(ours.push, theirs, "frame"),
    ),
    Kind("PushPullRequest", data_pb2.PushPullRequest, read_request, _same_push_pull),
    Kind("PushPullReply", data_pb2.PushPullReply, read_reply, _same_reply),
)


def seeds() -> list[tuple[int, bytes]]:
    """(index into KINDS, bytes) of whole messages that say something in every field."""
    frames = _frames()
    found = [(0, parameter_server_pb2.PushRequest(frame=frame).SerializeToString()) for frame in frames]
    found += [(1, data_pb2.PushPullRequest(push=frame).SerializeToString()) for frame in frames]
    found += [(1, write_push(PushFrameView(chunk=ChunkView(3, 1 << 33, bytes(range(256)) * 20))))]
    found += [(1, data_pb2.PushPullRequest(pull=_pull_request()).SerializeToString())]
    found += [(2, data_pb2.PushPullReply(ack=_ack()).SerializeToString())]
    return found + [(2, data_pb2.PushPullReply(pull=frame).SerializeToString()) for frame in _pull_frames()]


def _frames() -> list[data_pb2.PushFrame]:
    client = plain_client.PlainClient("127.0.0.1:1")
    try:
        frames = client.gradient(weight=0.5, hyper=[data_pb2.GroupHyper(group=1, values={"lr": 0.5})], codec="bf16")
        bucket = data_pb2.BucketHeader(bucket=1, dtype=common_pb2.DTYPE_INT8, elements=64, payload_bytes=64)
        frames.append(
            data_pb2.PushFrame(
                bucket=bucket,
                chunk=data_pb2.Chunk(bucket=1, payload=b"x" * 64, segment=1, crc32c=2, padding=b"p"),
                bucket_commit=data_pb2.BucketCommit(bucket=1, bytes=64, chunks=1, digest=1 << 63),
                commit=data_pb2.Commit(buckets=1, bytes=64, scale=0.5, skip=True, empty_buckets=[0, 2, 300]),
                refs=[data_pb2.BucketRef(bucket=bucket, offset=64, digest=7), data_pb2.BucketRef()],
            )
        )
    finally:
        client.close()
    return frames


def _pull_request() -> data_pb2.PullRequest:
    return data_pb2.PullRequest(exact_step=1 << 40, buckets=[1, 2], have_step=3, wait_s=2.0)


def _ack() -> data_pb2.PushAck:
    buckets = [data_pb2.BucketAck(bucket=1, outcome=common_pb2.OUTCOME_REFUSED, reason="größer")]
    return data_pb2.PushAck(outcome=common_pb2.OUTCOME_COUNTED, timeline=1 << 63, retry_after_s=0.5, buckets=buckets)


def _pull_frames() -> list[data_pb2.PullFrame]:
    state = data_pb2.BucketState(bucket=1, step=2, version=3, elements=64, payload_bytes=64, codec="raw", area=1)
    end = data_pb2.PullEnd(outcome=common_pb2.OUTCOME_WAITING, reason="r", waiting_for=[1, 2])
    return [
        data_pb2.PullFrame(bucket=state, chunk=data_pb2.Chunk(bucket=1, payload=b"y" * 64), end=end),
        data_pb2.PullFrame(buckets=[state, data_pb2.BucketState(unchanged=True)]),
    ]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A message with some bytes changed; where there is no guide by coverage."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, act = rng.randrange(len(found) + 1), rng.randrange(5)
        if act == 0:
            found[at:at] = bytes(rng.choice(INTERESTING) for _ in range(rng.randint(1, 12)))
        elif act == 1:
            del found[at : at + rng.randint(1, 5)]
        elif act == 2:
            found[at:at] = found[: rng.randrange(len(found) + 1)][:200]
        elif found:
            found[at % len(found)] = rng.choice(INTERESTING) if act == 3 else rng.randrange(256)
    return bytes(found)


INTERESTING = (0, 1, 0x08, 0x0A, 0x0D, 0x12, 0x1A, 0x22, 0x2A, 0x32, 0x7F, 0x80, 0xFF)
"""Tags of the fields there are, and ends of numbers."""


def long_messages(size: int) -> list[tuple[int, bytes]]:
    """Messages of about `size` bytes of which a careless reader would make many times their work."""
    refs = b"\x32\x00" * (size // 2)
    states = b"\x22\x00" * (size // 2)
    unknown = b"\xf8\x7f\x01" * (size // 3)
    chunk = b"\x1a" + varint(len(unknown)) + unknown
    digits = b"\x80" * size
    return [
        (1, b"\x0a" + varint(len(refs)) + refs),
        (2, b"\x12" + varint(len(states)) + states),
        (1, unknown),
        (1, b"\x0a" + varint(len(chunk)) + chunk),
        (0, digits),
        (1, b"\x0a\x00" * (size // 2)),
        (1, b"\x12" + varint(size) + b"\x38\x01" * (size // 2)),
    ]
