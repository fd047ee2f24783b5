"""Chunk frames encoded by hand: the bytes of proto/shardline/rpc/v1/data.proto without protobuf's copies.

A frame's small parts (headers, commits) are generated messages; only the chunk with the tensor bytes is written as tag,
length and memoryview, joined once, and read as a view of the received message. A client with generated stubs reads and
writes the same bytes. Short messages without a chunk are read and written whole by generated code.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.rpc.v1 import data_pb2

ALIGNMENT = 16
"""A large payload's offset within its message is a multiple of this, like the address of a bytes object's content."""
ALIGNED_FROM = 4096
"""Smaller payloads are not worth the padding."""
WHOLE_BYTES = 4 << 10
"""Messages of up to this size are read by generated code: it takes microseconds, and a chunk so small may be copied."""
MAX_REFERENCES = 1 << 16
"""Limit per frame; a shard of 64 GB has a quarter as many buckets."""
MAX_FIELDS = 2 * MAX_REFERENCES
"""Limit per message: unknown fields are skipped, but each takes time, during which nobody else is served."""
PART_BYTES = 4 << 20
"""Limit for a part of a frame other than the payload, before parsing: enough for all names and bitmaps of a shard."""
MAX_NUMBER = (1 << 64) - 1
MAX_TAG = MAX_BUCKET = (1 << 32) - 1
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types that proto3 uses."""


class Serializable(Protocol):
    """A generated message."""

    def SerializeToString(self) -> bytes: ...


def varint(value: int) -> bytes:
    """A number in base 128, least significant group first."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ProtocolError("frame with a truncated or endless number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > MAX_NUMBER:
                raise ProtocolError("frame with a number of more than 64 bits")
            return value, position
        shift += 7


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview | None]]:
    """(field number, value) of each field: a varint, a view of bytes, or None for one of fixed size.

    No field that is used here has a fixed size. Raises ProtocolError for malformed bytes.
    """
    position, end, count = 0, len(data), 0
    while position < end:
        count += 1
        if count > MAX_FIELDS:
            raise ProtocolError(f"frame with more than {MAX_FIELDS} fields in one message")
        # Most are of one byte, as are most lengths.
        tag = data[position]
        position += 1
        if tag >= 0x80:
            tag, position = _read_varint(data, position - 1)
        number, kind = tag >> 3, tag & 7
        if tag > MAX_TAG:
            raise ProtocolError(f"frame with field number {number}, which proto3 doesn't have")
        value: int | memoryview | None
        if kind == VARINT:
            value, position = _read_varint(data, position)
        elif kind == BYTES:
            size = data[position] if position < end else 0x80
            position += 1
            if size >= 0x80:
                size, position = _read_varint(data, position - 1)
            if size > end - position:
                raise ProtocolError(f"frame whose field {number} claims {size} bytes; {end - position} are left")
            value, position = data[position : position + size], position + size
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            if size > end - position:
                raise ProtocolError(f"frame whose field {number} is truncated")
            value, position = None, position + size
        else:
            raise ProtocolError(f"frame with wire type {kind} in field {number}, which proto3 doesn't have")
        if number == 0:
            raise ProtocolError("frame with field number 0")
        yield number, value


@dataclass(frozen=True, slots=True)
class ChunkView:
    """A chunk. payload: a view of the received message, or of the tensor to send."""

    bucket: int
    offset: int
    payload: Buffer


@dataclass(slots=True)
class PushFrameView:
    """PushFrame of data.proto; absent parts are None."""

    header: data_pb2.PushHeader | None = None
    bucket: data_pb2.BucketHeader | None = None
    chunk: ChunkView | None = None
    bucket_commit: data_pb2.BucketCommit | None = None
    commit: data_pb2.Commit | None = None
    refs: MutableSequence[data_pb2.BucketRef] = field(default_factory=list)


@dataclass(slots=True)
class PullFrameView:
    """PullFrame of data.proto; absent parts are None."""

    bucket: data_pb2.BucketState | None = None
    chunk: ChunkView | None = None
    end: data_pb2.PullEnd | None = None
    buckets: MutableSequence[data_pb2.BucketState] = field(default_factory=list)


@dataclass(slots=True)
class RequestView:
    """PushPullRequest (or PushRequest, whose only field is the frame)."""

    push: PushFrameView | None = None
    pull: data_pb2.PullRequest | None = None
    error: ProtocolError | None = None
    """Why the message can't be read. The handler raises it, since gRPC would lose a deserializer's error message."""


Request = RequestView | data_pb2.PushPullRequest
"""A request to send: a whole message where it has no chunk."""


@dataclass(slots=True)
class ReplyView:
    """PushPullReply (or PullReply, whose only field is the frame)."""

    ack: data_pb2.PushAck | None = None
    pull: PullFrameView | None = None
    error: ProtocolError | None = None


def _head(field: int, size: int) -> bytes:
    if field < 16 and size < 0x80:
        return bytes((field << 3 | BYTES, size))
    return varint(field << 3 | BYTES) + varint(size)


def _part(field: int, message: Serializable | None) -> bytes:
    if message is None:
        return b""
    data = message.SerializeToString()
    return _head(field, len(data)) + data


def _chunk_head(field: int, chunk: ChunkView, padding: bytes) -> bytes:
    """A chunk field's bytes before its payload."""
    inner = padding
    if chunk.bucket:
        inner += b"\x08" + varint(chunk.bucket)
    if chunk.offset:
        inner += b"\x10" + varint(chunk.offset)
    size = len(chunk.payload)
    if size:
        inner += b"\x1a" + varint(size)
    return _head(field, len(inner) + size) + inner


def write_push(frame: PushFrameView) -> bytes:
    """A PushPullRequest or PushRequest with this frame; copies the payload once."""
    before = _part(1, frame.header) + _part(2, frame.bucket)
    after = _part(4, frame.bucket_commit) + _part(5, frame.commit)
    if frame.refs:
        after += b"".join(_part(6, ref) for ref in frame.refs)
    return _join(1, before, frame.chunk, after)


def write_pull(frame: PullFrameView, *, outer: int) -> bytes:
    """A PushPullReply (outer field 2) or PullReply (1) with this frame; copies the payload once."""
    after = _part(3, frame.end)
    if frame.buckets:
        after += b"".join(_part(4, state) for state in frame.buckets)
    return _join(outer, _part(1, frame.bucket), frame.chunk, after, chunk_field=2)


def _join(outer: int, before: bytes, chunk: ChunkView | None, after: bytes, *, chunk_field: int = 3) -> bytes:
    if chunk is None:
        return b"".join((_head(outer, len(before) + len(after)), before, after))
    rest = len(before) + len(chunk.payload) + len(after)
    head = _chunk_head(chunk_field, chunk, b"")
    front = _head(outer, rest + len(head))
    if len(chunk.payload) >= ALIGNED_FROM:
        # Padding changes lengths and so maybe the size of a length field: compute the header again.
        missing = -(len(front) + len(before) + len(head) + 2) % ALIGNMENT
        head = _chunk_head(chunk_field, chunk, b"\x32" + varint(missing) + bytes(missing))
        front = _head(outer, rest + len(head))
    return b"".join((front, before, head, chunk.payload, after))


def _read_chunk(data: memoryview) -> ChunkView:
    bucket = offset = 0
    payload: memoryview = memoryview(b"")
    for number, value in fields(data):
        if number == 1 and isinstance(value, int):
            if value > MAX_BUCKET:
                # Protobuf would truncate it, and the chunk would belong to another bucket.
                raise ProtocolError(f"chunk of bucket {value}, a number of more than 32 bits")
            bucket = value
        elif number == 2 and isinstance(value, int):
            offset = value
        elif number == 3 and isinstance(value, memoryview):
            payload = value
        elif number in (1, 2, 3):
            raise ProtocolError(f"chunk whose field {number} has the wrong type")
    return ChunkView(bucket, offset, payload)


def _message(cls: Any, value: int | memoryview | None, what: str) -> Any:
    if not isinstance(value, memoryview):
        raise ProtocolError(f"frame whose {what} is not a message")
    if len(value) > PART_BYTES:
        raise ProtocolError(f"frame whose {what} has {len(value)} bytes; the limit is {PART_BYTES}")
    try:
        return cls.FromString(value)
    except DecodeError as error:
        raise ProtocolError(f"frame whose {what} can't be read: {error}") from None


def _once(present: object, what: str) -> None:
    # Protobuf would merge the two; our code never sends that, and merging half-checked headers only helps an attacker.
    if present is not None:
        raise ProtocolError(f"frame with two of {what}")


def _add(found: MutableSequence[Any], item: Any) -> None:
    if len(found) >= MAX_REFERENCES:
        raise ProtocolError(f"frame with more than {MAX_REFERENCES} references; send several")
    found.append(item)


def read_push(data: memoryview) -> PushFrameView:
    """A PushFrame; the chunk's payload is a view of `data`."""
    frame = PushFrameView()
    for number, value in fields(data):
        if number == 1:
            _once(frame.header, "header")
            frame.header = _message(data_pb2.PushHeader, value, "header")
        elif number == 2:
            _once(frame.bucket, "bucket")
            frame.bucket = _message(data_pb2.BucketHeader, value, "bucket")
        elif number == 3:
            _once(frame.chunk, "chunk")
            if not isinstance(value, memoryview):
                raise ProtocolError("frame whose chunk is not a message")
            frame.chunk = _read_chunk(value)
        elif number == 4:
            _once(frame.bucket_commit, "bucket_commit")
            frame.bucket_commit = _message(data_pb2.BucketCommit, value, "bucket_commit")
        elif number == 5:
            _once(frame.commit, "commit")
            frame.commit = _message(data_pb2.Commit, value, "commit")
        elif number == 6:
            _add(frame.refs, _message(data_pb2.BucketRef, value, "reference"))
    return frame


def read_pull(data: memoryview) -> PullFrameView:
    """A PullFrame; the chunk's payload is a view of `data`."""
    frame = PullFrameView()
    for number, value in fields(data):
        if number == 1:
            _once(frame.bucket, "bucket")
            frame.bucket = _message(data_pb2.BucketState, value, "bucket")
        elif number == 2:
            _once(frame.chunk, "chunk")
            if not isinstance(value, memoryview):
                raise ProtocolError("frame whose chunk is not a message")
            frame.chunk = _read_chunk(value)
        elif number == 3:
            _once(frame.end, "end")
            frame.end = _message(data_pb2.PullEnd, value, "end")
        elif number == 4:
            _add(frame.buckets, _message(data_pb2.BucketState, value, "bucket state"))
    return frame


def _whole(cls: Any, data: bytes) -> Any:
    """A short message as generated code reads it; None if it has to be read by hand, which names what is wrong.

    Its size says that no part came twice: two would have been merged.
    """
    if len(data) > WHOLE_BYTES:
        return None
    try:
        message = cls.FromString(data)
    except DecodeError:
        return None
    return message if message.ByteSize() == len(data) else None


def read_request(data: bytes) -> RequestView:
    """A PushPullRequest or PushRequest; never raises, see RequestView.error."""
    message = _whole(data_pb2.PushPullRequest, data)
    if message is not None and message.HasField("push"):
        push, pull = message.push, message.pull if message.HasField("pull") else None
        # What has a header and a commit is a push in one frame.
        if push.HasField("header") and push.HasField("commit") and not push.HasField("chunk"):
            bucket = push.bucket if push.HasField("bucket") else None
            end = push.bucket_commit if push.HasField("bucket_commit") else None
            return RequestView(PushFrameView(push.header, bucket, None, end, push.commit, push.refs), pull)
    view = RequestView()
    try:
        for number, value in fields(memoryview(data)):
            if number == 1:
                _once(view.push, "push")
                if not isinstance(value, memoryview):
                    raise ProtocolError("request whose push is not a message")
                view.push = read_push(value)
            elif number == 2:
                _once(view.pull, "pull")
                view.pull = _message(data_pb2.PullRequest, value, "pull")
    except ProtocolError as error:
        return RequestView(error=error)
    return view


def read_reply(data: bytes) -> ReplyView:
    """A PushPullReply; never raises, see ReplyView.error."""
    message = _whole(data_pb2.PushPullReply, data)
    if message is not None and message.HasField("pull"):
        ack, pull = message.ack if message.HasField("ack") else None, message.pull
        # What has an end and no chunk is the answer to a pull in one message, or its last one.
        if pull.HasField("end") and not pull.HasField("bucket") and not pull.HasField("chunk"):
            return ReplyView(ack, PullFrameView(None, None, pull.end, pull.buckets))
    view = ReplyView()
    try:
        for number, value in fields(memoryview(data)):
            if number == 1:
                _once(view.ack, "ack")
                view.ack = _message(data_pb2.PushAck, value, "ack")
            elif number == 2:
                _once(view.pull, "pull")
                if not isinstance(value, memoryview):
                    raise ProtocolError("reply whose pull is not a message")
                view.pull = read_pull(value)
    except ProtocolError as error:
        return ReplyView(error=error)
    return view


def write_request(view: Request) -> bytes:
    if isinstance(view, data_pb2.PushPullRequest):
        return view.SerializeToString()
    if view.push is None:
        return _part(2, view.pull)
    # After the push, so that a chunk is aligned; the order of a message's fields has no meaning.
    push = write_push(view.push)
    return push if view.pull is None else push + _part(2, view.pull)


def write_reply(view: ReplyView) -> bytes:
    if view.ack is not None:
        return _part(1, view.ack)
    assert view.pull is not None
    return write_pull(view.pull, outer=2)
