"""Messages of pushes and pulls on the client side: converts the values of the lane seam to messages and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shardline.core.image import BucketImage
from shardline.core.outcome import PROTOCOL_MINOR, Outcome
from shardline.core.tensor_bytes import copy_bytes, digest, tensor_bytes
from shardline.errors import ProtocolError
from shardline.rpc.channel import Peer
from shardline.rpc.messages.convert import DTYPE_TO_PROTO, hyper_from_proto, hyper_to_proto, image_parts
from shardline.rpc.messages.fields import from_message
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from shardline.waist import CHUNK_BYTES, Ack, Arrival, End, Payload, Push, Sender, Sink, Standing, Want

SMALL_BYTES = 64 << 10
"""Bytes that take about as long to send as a message costs both sides; a socket's buffers hold that much unread."""
QUICK_BYTES = 8 << 20
"""A push of so few bytes is named in one message and sent by the thread that then reads the answer, where all of it is
ready: that thread is done in less time than a second one would need to begin. What is answered meanwhile, bucket by
bucket, waits in the other socket."""
M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """The message of this kind in these bytes. Raises ProtocolError."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes can't be read as a {kind.DESCRIPTOR.name}: {error}") from None


_OUTCOMES: dict[int, Outcome] = {common_pb2.Outcome.Value(f"OUTCOME_{outcome.name}"): outcome for outcome in Outcome}


def outcome_from_proto(value: int) -> Outcome:
    """The outcome of the same name. Raises ProtocolError if this version doesn't know it."""
    try:
        return _OUTCOMES[value]
    except KeyError:
        raise ProtocolError(f"outcome number {value} is unknown to this version; update Shardline") from None


_LANES = {name.removeprefix("LANE_").lower(): number for name, number in common_pb2.Lane.items() if number}
_LANE_NAMES: dict[int, str] = {int(number): name for name, number in _LANES.items()}


def lane_name(number: int) -> str | None:
    """Name of a lane on the wire; None if it belongs to a later version."""
    return _LANE_NAMES.get(number or common_pb2.LANE_GRPC)


def lane_number(name: str) -> common_pb2.Lane.ValueType:
    return _LANES[name]


class OneRequest:
    """A push and a pull as one message, which is kept: in a step like the one before only a few numbers change.

    Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._of: tuple[Sender, int] | None = None
        self._message = data_pb2.PushPullRequest()

    def of(self, sender: Sender, shard: int, attached: Attached) -> data_pb2.PushPullRequest:
        """The message of these calls, with the sender set, and the rest as the last call left it."""
        known = self._of
        if known is None or known[0] is not sender or known[1] != shard:
            self._of = sender, shard
            self._message = data_pb2.PushPullRequest()
            self._message.push.header.data.CopyFrom(data_header(sender, shard, attached))
        return self._message


@dataclass(frozen=True)
class Attached:
    """The lane that carries the bytes of a call."""

    lane: str = "grpc"
    number: int = 0
    """Number of the attachment, from OpenLane; 0 = the call's own stream."""
    in_place: bool = False
    """The shard reads the bytes where they are, without a copy."""
    one: OneRequest = field(default_factory=OneRequest, compare=False)
    """The attachment's calls that are one request."""


ON_STREAM = Attached()


def data_header(sender: Sender, shard: int, attached: Attached = ON_STREAM) -> common_pb2.DataHeader:
    return common_pb2.DataHeader(
        job=sender.job,
        timeline=sender.timeline,
        plan_id=sender.plan_id,
        shard=shard,
        task=sender.who.task,
        incarnation=sender.who.incarnation,
        secret=sender.who.secret,
        protocol_minor=PROTOCOL_MINOR,
        lane=lane_number(attached.lane),
        attachment=attached.number,
    )


def _fill_header(header: data_pb2.PushHeader, push: Push) -> None:
    """Set all of it but the sender."""
    if push.by is not None and push.by.task != header.data.task:
        raise ProtocolError(f"{header.data.task} can't send what {push.by.task} has numbered over its own connection")
    header.step, header.seq, header.clock = push.step, push.seq, push.clock
    header.block.first, header.block.count = push.block.first, push.block.count
    header.base_min, header.base_max = push.base_min, push.base_max
    header.kind = data_pb2.PUSH_KIND_INIT if push.init else data_pb2.PUSH_KIND_GRADIENT
    header.codec, header.num_samples, header.partial = push.codec, push.num_samples, push.partial
    del header.hyper[:], header.nonfinite_tensors[:]
    if push.hyper:
        header.hyper.extend(hyper_to_proto(push.hyper))
    header.nonfinite_tensors.extend(push.nonfinite)


def _fill_bucket(header: data_pb2.BucketHeader, item: Payload) -> None:
    header.bucket, header.elements, header.payload_bytes = item.bucket, item.elements, item.nbytes
    header.dtype, header.present = DTYPE_TO_PROTO[item.dtype], item.present
    header.bound, header.fingerprint = item.bound, item.fingerprint
    del header.nonfinite_tensors[:]
    header.nonfinite_tensors.extend(item.nonfinite)


def _fill_commit(commit: data_pb2.Commit, push: Push, buckets: int, nbytes: int) -> None:
    commit.buckets, commit.bytes, commit.skip = buckets, nbytes, push.skip
    commit.scale = 0.0 if push.scale == 1.0 else push.scale
    del commit.empty_buckets[:]
    commit.empty_buckets.extend(push.payloads.empty)


def is_small(contributions: Sequence[Push]) -> bool:
    """Whether a push is too small for a message per chunk: it is held until its last bucket and sent in few frames.

    True if nothing is pushed.
    """
    return not contributions or (len(contributions) == 1 and contributions[0].payloads.nbytes <= SMALL_BYTES)


def is_one_message(contributions: Sequence[Push], attached: Attached) -> bool:
    """Whether a push over an attachment is one request: because it is small, or at hand, or its bytes stay in place."""
    if len(contributions) == 1:
        payloads = contributions[0].payloads
        if payloads.at_once or (attached.in_place and payloads.in_place):
            return True
    return is_small(contributions)


def gathered(push: Push) -> list[Payload]:
    """All buckets of a push, once the last one is ready. Raises what Payloads.batches() raises."""
    return [item for batch in push.payloads.batches() for item in batch]


def _digest(item: Payload) -> int:
    """Digest of the payload; computed now if the bytes were to stay in place but are sent by another lane after all."""
    return item.digest or digest(item.octets)


def referred_requests(
    sender: Sender,
    shard: int,
    contributions: Sequence[Push],
    want: Want | None,
    attached: Attached,
    *,
    place: Callable[[Payload], int],
    after: Callable[[Sequence[Payload]], None] = lambda batch: None,
) -> Iterator[data_pb2.PushPullRequest]:
    """Requests of one PushPull whose bytes travel by an attachment. The pull goes first, as on a stream.

    place(payload): called before its reference is sent; returns its offset in the segment (shm). after(batch): called
    once the references of a batch are sent, on the same thread; a tcp lane sends the bytes then.
    If is_one_message() is true, there is a single request; if is_small() is, after() comes before it: few bytes wait in
    the socket, and the shard need not wait for them.
    """
    if contributions and is_one_message(contributions, attached):
        items, small = gathered(contributions[0]), is_small(contributions)
        message = _one_request(sender, shard, contributions[0], items, want, attached, place)
        if small:
            after(items)
        yield message
        if not small:
            after(items)
        return
    data = data_header(sender, shard, attached)
    if want is not None:
        yield data_pb2.PushPullRequest(pull=pull_request(data, want))
    for push in contributions:
        request = data_pb2.PushPullRequest()
        request.push.header.data.CopyFrom(data)
        _fill_header(request.push.header, push)
        buckets = total = 0
        for batch in push.payloads.batches():
            for item in batch:
                _fill_ref(request.push.refs.add(), item, place(item), attached)
            yield request
            request = data_pb2.PushPullRequest()
            after(batch)
            buckets += len(batch)
            total += sum(item.nbytes for item in batch)
        _fill_commit(request.push.commit, push, buckets, total)
        yield request


def _one_request(
    sender: Sender,
    shard: int,
    push: Push,
    items: Sequence[Payload],
    want: Want | None,
    attached: Attached,
    place: Callable[[Payload], int],
) -> data_pb2.PushPullRequest:
    """A whole push of these buckets with its pull. Valid until the next one over the attachment."""
    message = attached.one.of(sender, shard, attached)
    frame = message.push
    _fill_header(frame.header, push)
    refs = frame.refs
    del refs[len(items) :]
    for number, item in enumerate(items):
        _fill_ref(refs[number] if number < len(refs) else refs.add(), item, place(item), attached)
    _fill_commit(frame.commit, push, len(items), sum([item.nbytes for item in items]))
    if want is None:
        message.ClearField("pull")
    else:
        if not message.HasField("pull"):
            message.pull.data.CopyFrom(frame.header.data)
        _fill_pull(message.pull, want)
    return message


def _fill_ref(ref: data_pb2.BucketRef, item: Payload, offset: int, attached: Attached) -> None:
    _fill_bucket(ref.bucket, item)
    ref.offset, ref.digest = offset, item.digest if attached.in_place else _digest(item)


def pull_request(data: common_pb2.DataHeader, want: Want) -> data_pb2.PullRequest:
    """A pull of an exact step, or of the latest."""
    request = data_pb2.PullRequest(data=data)
    _fill_pull(request, want)
    return request


def _fill_pull(request: data_pb2.PullRequest, want: Want) -> None:
    """Set all of it but the sender."""
    request.what, request.wait_s = data_pb2.PULL_WHAT_PARAMS, want.wait_s
    del request.buckets[:]
    request.buckets.extend(want.buckets)
    del request.rows[:]
    for bucket, ids in want.rows.items():
        request.rows.add(bucket=bucket, ids=bytes(tensor_bytes(ids)))
    if want.have_step is None:
        request.ClearField("have_step")
    else:
        request.have_step = want.have_step
    if want.ahead is not None:
        request.at_least_step = want.ahead
    elif want.step is None:
        request.latest = True
    else:
        request.exact_step = want.step


def exchange_requests(
    sender: Sender, shard: int, contributions: Sequence[Push], want: Want | None
) -> Iterator[data_pb2.PushPullRequest]:
    """Requests of one PushPull. The pull goes first, so that buckets are answered while others are still being sent.

    There is one request per chunk; a bucket's header and end are in its first and last chunk. If is_small() is true,
    the header, pull and end of the push are in its first and last request; else they are requests of their own.
    """
    joined = bool(contributions) and is_small(contributions)
    request, data = data_pb2.PushPullRequest(), data_header(sender, shard)
    if want is not None:
        request.pull.data.CopyFrom(data)
        _fill_pull(request.pull, want)
        if not joined:
            yield request
            request = data_pb2.PushPullRequest()
    for push in contributions:
        request.push.header.data.CopyFrom(data)
        _fill_header(request.push.header, push)
        if not joined:
            yield request
            request = data_pb2.PushPullRequest()
        buckets = total = 0
        for batch in push.payloads.batches():
            for item in batch:
                size = item.nbytes
                for offset in range(0, max(size, 1), CHUNK_BYTES):
                    if joined and request.push.HasField("bucket"):
                        yield request
                        request = data_pb2.PushPullRequest()
                    _fill_part(request.push, item, offset)
                    if not joined:
                        yield request
                        request = data_pb2.PushPullRequest()
                buckets += 1
                total += size
        _fill_commit(request.push.commit, push, buckets, total)
        yield request
        request = data_pb2.PushPullRequest()


def _fill_part(frame: data_pb2.PushFrame, item: Payload, offset: int) -> None:
    """Put the bytes of a bucket from an offset into a frame, with the bucket's header and end where they belong."""
    size, data = item.nbytes, item.octets
    end = min(offset + CHUNK_BYTES, size)
    if offset == 0:
        _fill_bucket(frame.bucket, item)
    if size:
        frame.chunk.bucket, frame.chunk.offset = item.bucket, offset
        frame.chunk.payload = bytes(data[offset:end])
    if end == size:
        commit = frame.bucket_commit
        commit.bucket, commit.bytes, commit.chunks = item.bucket, size, -(-size // CHUNK_BYTES)
        commit.digest = _digest(item)


def open_lane_request(sender: Sender, shard: int, lane: str) -> parameter_server_pb2.OpenLaneRequest:
    return parameter_server_pb2.OpenLaneRequest(data=data_header(sender, shard, Attached(lane)), beside=sender.beside)


def progress_request(sender: Sender, shard: int, replicas: Sequence[int]) -> data_pb2.ProgressRequest:
    return data_pb2.ProgressRequest(data=data_header(sender, shard), replicas=replicas)


def state_request(
    sender: Sender, shard: int, step: int, buckets: Sequence[int]
) -> parameter_server_pb2.GetStateRequest:
    """Request for the state of some buckets at a step, where workers run the optimizer."""
    return parameter_server_pb2.GetStateRequest(data=data_header(sender, shard), step=step, buckets=buckets)


def state_frames(
    sender: Sender, shard: int, images: Sequence[BucketImage]
) -> Iterator[parameter_server_pb2.PutStateFrame]:
    yield parameter_server_pb2.PutStateFrame(data=data_header(sender, shard))
    for image in images:
        for header, chunk in image_parts(image):
            yield parameter_server_pb2.PutStateFrame(header=header, chunk=chunk)
    yield parameter_server_pb2.PutStateFrame(end=parameter_server_pb2.ImageEnd(buckets=len(images)))


def ps_stub(peer: Peer) -> parameter_server_pb2_grpc.ParameterServerStub:
    return parameter_server_pb2_grpc.ParameterServerStub(peer.channel)


def ack_from_proto(message: data_pb2.PushAck) -> Ack:
    """Result of a push; includes the reason for the first bucket that differs."""
    reason = message.reason
    for item in message.buckets:
        reason = reason or item.reason
    return Ack(
        outcome=outcome_from_proto(message.outcome),
        reason=reason,
        step=message.step,
        version=message.version,
        staleness=message.staleness,
        next_seq=message.next_seq,
        timeline=message.timeline,
        mismatch=message.mismatch,
    )


def standing_from_proto(message: data_pb2.ProgressReply) -> Standing:
    replicas = {item.replica: item.step for item in message.replicas}
    return from_message(Standing, message, outcome=outcome_from_proto(message.outcome), replicas=replicas)


class PullReader:
    """Reads the frames of one pull's reply into the sink."""

    def __init__(self, sink: Sink, elements: Sequence[int]) -> None:
        self._sink = sink
        self._elements = elements
        self._arrival: Arrival | None = None
        self._memory = memoryview(b"")
        self._filled = 0
        self.end: End | None = None

    def feed(self, frame: data_pb2.PullFrame) -> Sequence[Arrival]:
        """Take one frame; returns the buckets it refers to, whose bytes travel by the call's attachment.

        Raises ProtocolError if frames are out of order.
        """
        if frame.HasField("bucket"):
            self._begin(frame.bucket)
        if frame.HasField("chunk"):
            self._chunk(frame.chunk)
        if frame.HasField("end"):
            end = frame.end
            if self._arrival is not None and end.outcome == common_pb2.OUTCOME_SERVED:
                raise ProtocolError(f"the answer to a pull ended within bucket {self._arrival.bucket}")
            # Any other outcome explains why the bucket is incomplete.
            self._arrival = None
            self.end = End(
                outcome=outcome_from_proto(end.outcome),
                reason=end.reason,
                step=end.step,
                version=end.version,
                timeline=end.timeline,
                waiting_for=tuple(end.waiting_for),
                wants_state=end.wants_state,
                hyper=hyper_from_proto(end.hyper) if end.hyper else {},
            )
        return [self._arrival_of(state) for state in frame.buckets]

    def _arrival_of(self, state: data_pb2.BucketState) -> Arrival:
        if state.bucket >= len(self._elements) or state.elements != self._elements[state.bucket]:
            raise ProtocolError(
                f"the shard sent bucket {state.bucket} with {state.elements} elements, which is not in the plan"
            )
        return Arrival(
            bucket=state.bucket,
            step=state.step,
            version=state.version,
            unchanged=state.unchanged,
            codec=state.codec,
            payload_bytes=state.payload_bytes,
            lasting=state.area < 2,
            place=(state.area, state.offset),
        )

    def _begin(self, state: data_pb2.BucketState) -> None:
        if self._arrival is not None:
            raise ProtocolError(f"bucket {state.bucket} arrived before bucket {self._arrival.bucket} was complete")
        arrival = self._arrival_of(state)
        if state.unchanged or state.payload_bytes == 0:
            self._sink.done(arrival)
            return
        self._arrival, self._filled = arrival, 0

    def _chunk(self, chunk: data_pb2.Chunk) -> None:
        arrival, payload = self._arrival, chunk.payload
        end = chunk.offset + len(payload)
        if (
            arrival is None
            or chunk.bucket != arrival.bucket
            or chunk.offset != self._filled
            or end > arrival.payload_bytes
        ):
            raise ProtocolError(f"the shard sent a chunk of bucket {chunk.bucket} at {chunk.offset} out of order")
        if len(payload) == arrival.payload_bytes:
            self._arrival = None
            self._sink.whole(arrival, payload)
            return
        if self._filled == 0:
            self._memory = self._sink.buffer(arrival)
        copy_bytes(self._memory[chunk.offset : end], payload)
        self._filled = end
        if end == arrival.payload_bytes:
            self._arrival = None
            self._sink.done(arrival)
