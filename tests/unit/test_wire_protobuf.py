"""Hand-written frames are the bytes that generated messages write and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ProtocolError
from shardline.rpc.v1 import data_pb2
from shardline.wire import protobuf
from shardline.wire.protobuf import (
    MAX_FIELDS,
    MAX_REFERENCES,
    ChunkView,
    PullFrameView,
    PushFrameView,
    ReplyView,
    RequestView,
    fields,
    read_pull,
    read_push,
    read_reply,
    read_request,
    varint,
    write_pull,
    write_reply,
    write_request,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PAYLOADS = st.binary(max_size=300)


def maybe(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.none() | strategy


HEADERS = st.builds(
    lambda step, empty, codec: data_pb2.PushHeader(step=step, empty_buckets=empty, codec=codec),
    U64,
    st.lists(U32, max_size=4),
    st.sampled_from(["", "raw", "bf16"]),
)
BUCKETS = st.builds(lambda bucket, elements: data_pb2.BucketHeader(bucket=bucket, elements=elements), U32, U64)
CHUNKS = st.builds(ChunkView, U32, U64, PAYLOADS)
ENDS = st.builds(
    lambda bucket, size, digest: data_pb2.BucketCommit(bucket=bucket, bytes=size, digest=digest), U32, U64, U64
)
COMMITS = st.builds(lambda count, scale: data_pb2.Commit(buckets=count, scale=scale), U32, st.floats(allow_nan=False))
PUSHES = st.builds(PushFrameView, maybe(HEADERS), maybe(BUCKETS), maybe(CHUNKS), maybe(ENDS), maybe(COMMITS))
STATES = st.builds(
    lambda bucket, step, same: data_pb2.BucketState(bucket=bucket, step=step, unchanged=same), U32, U64, st.booleans()
)
PULLS = st.builds(
    PullFrameView,
    maybe(STATES),
    maybe(CHUNKS),
    maybe(st.builds(lambda step, who: data_pb2.PullEnd(step=step, waiting_for=who), U64, st.lists(U32, max_size=3))),
)


def generated_push(frame: PushFrameView) -> data_pb2.PushFrame:
    message = data_pb2.PushFrame()
    for name in ("header", "bucket", "bucket_commit", "commit"):
        part = getattr(frame, name)
        if part is not None:
            getattr(message, name).CopyFrom(part)
    if frame.chunk is not None:
        message.chunk.SetInParent()
        message.chunk.bucket, message.chunk.offset = frame.chunk.bucket, frame.chunk.offset
        message.chunk.payload = bytes(frame.chunk.payload)
    return message


def generated_pull(frame: PullFrameView) -> data_pb2.PullFrame:
    message = data_pb2.PullFrame()
    for name in ("bucket", "end"):
        part = getattr(frame, name)
        if part is not None:
            getattr(message, name).CopyFrom(part)
    if frame.chunk is not None:
        message.chunk.SetInParent()
        message.chunk.bucket, message.chunk.offset = frame.chunk.bucket, frame.chunk.offset
        message.chunk.payload = bytes(frame.chunk.payload)
    return message


@given(PUSHES)
def test_a_push_frame_is_byte_for_byte_what_generated_code_writes(frame: PushFrameView) -> None:
    generated = data_pb2.PushPullRequest(push=generated_push(frame))
    written = write_request(RequestView(push=frame))
    assert written == generated.SerializeToString(deterministic=True)
    assert data_pb2.PushPullRequest.FromString(written) == generated
    read = read_request(written)
    assert read.error is None
    assert read.push == frame


@given(PULLS)
def test_a_pull_frame_is_byte_for_byte_what_generated_code_writes(frame: PullFrameView) -> None:
    generated = data_pb2.PushPullReply(pull=generated_pull(frame))
    written = write_reply(ReplyView(pull=frame))
    assert written == generated.SerializeToString(deterministic=True)
    read = read_reply(written)
    assert read.error is None
    assert read.pull == frame
    assert write_pull(frame, outer=1)[1:] == written[1:]


def test_requests_and_acks_without_chunks_pass_through_generated_messages() -> None:
    pull = data_pb2.PullRequest(exact_step=7, buckets=[2, 1])
    assert read_request(data_pb2.PushPullRequest(pull=pull).SerializeToString()).pull == pull
    assert write_request(RequestView(pull=pull)) == data_pb2.PushPullRequest(pull=pull).SerializeToString()
    ack = data_pb2.PushAck(step=3, reason="because")
    assert read_reply(write_reply(ReplyView(ack=ack))).ack == ack


def test_a_payload_is_a_view_of_the_message_it_came_in() -> None:
    data = write_request(RequestView(push=PushFrameView(chunk=ChunkView(1, 0, b"x" * 1000))))
    frame = read_request(data).push
    assert frame is not None and frame.chunk is not None
    assert isinstance(frame.chunk.payload, memoryview)
    assert frame.chunk.payload.obj is data


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_with_a_sentence(data: bytes) -> None:
    for view in (read_request(data), read_reply(data)):
        assert view.error is None or str(view.error)


@given(PUSHES, st.data())
def test_a_frame_cut_anywhere_never_reads_as_more_than_it_holds(frame: PushFrameView, data: st.DataObject) -> None:
    written = write_request(RequestView(push=frame))
    cut = data.draw(st.integers(0, len(written)))
    view = read_request(written[:cut])
    if view.error is None and view.push is not None and view.push.chunk is not None:
        assert len(view.push.chunk.payload) <= cut


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x0a\xff\xff\xff\xff\x0f", "claims"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\x02\x1a\x7f", "claims"),
        (b"\xff" * 11, "endless"),
        (b"\x08\x01", "is not a message"),
        (b"\x0a\x00\x0a\x00", "two of push"),
        (b"\x02\x00", "field number 0"),
        (b"\x0d\x01", "truncated"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (varint(1 << 35) + b"\x00", "field number 4294967296"),
        (b"\x0a\x08\x1a\x06\x08\xff\xff\xff\xff\x1f", "bucket 8589934591, a number of more than 32 bits"),
        (b"\x0a\x07\x1a\x05\x0d\x01\x00\x00\x00", "chunk whose field 1 has the wrong type"),
        (b"\x78\x00" * (MAX_FIELDS + 1), "more than 131072 fields in one message"),
    ],
)
def test_malformed_frames_are_refused_by_name(data: bytes, sentence: str) -> None:
    error = read_request(data).error
    assert isinstance(error, ProtocolError)
    assert sentence in str(error)


@given(U64)
def test_numbers_round_trip(value: int) -> None:
    assert list(fields(memoryview(b"\x08" + varint(value)))) == [(1, value)]


REFERENCES = {
    "push": (b"\x32\x00", read_push, "PushFrameView", "refs"),
    "pull": (b"\x22\x00", read_pull, "PullFrameView", "buckets"),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_frame_has_so_many_references_and_no_more(kind: str) -> None:
    reference, read, _, name = REFERENCES[kind]
    assert len(getattr(read(memoryview(reference * MAX_REFERENCES)), name)) == MAX_REFERENCES
    with pytest.raises(ProtocolError, match="frame with more than 65536 references; send several"):
        read(memoryview(reference * (MAX_REFERENCES + 1)))


@pytest.mark.parametrize("kind", REFERENCES)
def test_references_are_gathered_in_one_list_and_never_copied(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, read, view, name = REFERENCES[kind]
    copied = 0

    class Watched(getattr(protobuf, view)):  # type: ignore[misc]
        """Counts the references in every list that takes the place of another."""

        def __setattr__(self, attribute: str, value: object) -> None:
            nonlocal copied
            if attribute == name:
                assert isinstance(value, list | tuple)
                copied += len(value)
            super().__setattr__(attribute, value)

    monkeypatch.setattr(protobuf, view, Watched)
    assert len(getattr(read(memoryview(reference * 1000)), name)) == 1000
    assert copied == 0
