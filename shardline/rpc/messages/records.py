"""Records from a primary for its standby, as values and as frames of the Replication service. PROTOCOL 1.8."""

from __future__ import annotations

from collections.abc import Iterator

from shardline.core.choices import choice_from_bytes, choice_to_bytes
from shardline.core.image import BucketImage
from shardline.core.plan import ShardSpec
from shardline.core.records import Applied, AppliedPush, Begin, Digest, Head, Image, Mark, Record, RecordPart
from shardline.core.spec import DTYPES, TensorKind
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.rpc.limits import RECORD_CHUNK_BYTES
from shardline.rpc.messages.convert import (
    DTYPE_TO_PROTO,
    Chunks,
    ImageAssembler,
    dtype_from_proto,
    image_parts,
    pack_bits,
    unpack_bits,
)
from shardline.rpc.messages.data import outcome_from_proto
from shardline.rpc.messages.fields import converts, from_message, to_message
from shardline.rpc.messages.status import choices_from_proto, choices_to_proto
from shardline.rpc.v1 import common_pb2, parameter_server_pb2

PREVIOUS = "previous"
"""Name of the previous step's values among the tensors of a copied bucket."""


Entry = Record | Image | Mark
Frame = Head | Begin | Record | Image | Mark | Digest
Message = parameter_server_pb2.ReplicaFrame


def frames_of(frame: Frame) -> Iterator[bytes]:
    match frame:
        case Head():
            yield Message(head=to_message(parameter_server_pb2.ReplicaHead, frame)).SerializeToString()
        case Begin():
            yield Message(begin=parameter_server_pb2.ReplicaBegin(copy=frame.copy)).SerializeToString()
        case Record():
            yield Message(record=_record_to_proto(frame)).SerializeToString()
            for number, part in enumerate(frame.parts):
                yield from _chunks(number, part.values)
        case Image():
            for header, chunk in image_parts(frame.image):
                if header is not None:
                    image = parameter_server_pb2.ReplicaImage(number=frame.number, header=header)
                    yield Message(image=image).SerializeToString()
                else:
                    yield Message(image_chunk=chunk).SerializeToString()
        case Mark():
            differing = {"sequences": [*map(_push_to_proto, frame.pushes)], "choices": choices_to_proto(frame.choices)}
            mark = to_message(parameter_server_pb2.ReplicaMark, frame, without={"pushes"}, **differing)
            yield Message(mark=mark).SerializeToString()
        case Digest():
            yield Message(digest=to_message(parameter_server_pb2.ReplicaDigest, frame)).SerializeToString()


def _chunks(part: int, values: Buffer | None) -> Iterator[bytes]:
    view = memoryview(values or b"")
    for offset in range(0, len(view), RECORD_CHUNK_BYTES):
        payload = bytes(view[offset : offset + RECORD_CHUNK_BYTES])
        chunk = parameter_server_pb2.ReplicaChunk(part=part, offset=offset, payload=payload)
        yield Message(chunk=chunk).SerializeToString()


def _record_to_proto(record: Record) -> parameter_server_pb2.ReplicaRecord:
    return to_message(
        parameter_server_pb2.ReplicaRecord,
        record,
        without={"push"},
        parts=[
            parameter_server_pb2.ReplicaPart(
                bucket=part.bucket,
                step=part.step,
                dtype=DTYPE_TO_PROTO[part.dtype],
                elements=len(part.values or b"") // DTYPES[part.dtype].itemsize,
                present=pack_bits(part.present),
                hyper=part.hyper,
            )
            for part in record.parts
        ],
        sequence=_push_to_proto(record.push) if record.push is not None else None,
    )


def verdict_to_proto(verdict: Applied) -> parameter_server_pb2.ReplicaVerdict:
    return to_message(parameter_server_pb2.ReplicaVerdict, verdict, choice=choice_to_bytes(verdict.choice))


def verdict_from_proto(message: parameter_server_pb2.ReplicaVerdict) -> Applied:
    return from_message(Applied, message, choice=choice_from_bytes(message.choice))


def _push_to_proto(push: AppliedPush) -> parameter_server_pb2.ReplicaSequence:
    outcome = common_pb2.Outcome.Value(f"OUTCOME_{push.outcome.name}")
    return to_message(parameter_server_pb2.ReplicaSequence, push, outcome=outcome)


def _push_from_proto(message: parameter_server_pb2.ReplicaSequence) -> AppliedPush:
    return from_message(AppliedPush, message, outcome=outcome_from_proto(message.outcome))


converts(Applied, verdict_to_proto, verdict_from_proto)


class FrameReader:
    """Reassembles frames: feed() returns a value whenever one is complete.

    shard: limits what a frame can make us allocate. Raises ProtocolError if frames don't match it, or don't follow each
    other without gap or overlap.
    """

    def __init__(self, shard: ShardSpec) -> None:
        self._shard = shard
        self._assembler = ImageAssembler(max_bytes=shard.image_bytes)
        self._image = 0
        self._record: parameter_server_pb2.ReplicaRecord | None = None
        """One whose chunks are still arriving."""
        self._chunks = Chunks(())

    def feed(self, message: Message) -> Frame | None:
        """Take one message; returns a frame if it is complete now."""
        kind = [name.name for name, _ in message.ListFields()]
        if len(kind) != 1:
            raise ProtocolError(
                f"a frame of a standby's stream must contain one item; this one contains {kind or 'nothing'}"
            )
        within = "chunk" if self._record is not None else "image_chunk" if not self._assembler.idle else None
        if (within is not None or kind[0] in ("chunk", "image_chunk")) and kind[0] != within:
            raise ProtocolError(f"a standby's stream has {kind[0]}; expected {within or 'no chunk'}")
        match kind[0]:
            case "head":
                return from_message(Head, message.head)
            case "begin":
                return Begin(message.begin.copy)
            case "record":
                return self._begin_record(message.record)
            case "chunk":
                return self._chunk(message.chunk)
            case "image":
                self._image = message.image.number
                return self._taken(self._assembler.feed(message.image.header, None))
            case "image_chunk":
                return self._taken(self._assembler.feed(None, message.image_chunk))
            case "mark":
                pushes = tuple(map(_push_from_proto, message.mark.sequences))
                return from_message(Mark, message.mark, pushes=pushes, choices=choices_from_proto(message.mark.choices))
        return from_message(Digest, message.digest)

    def _taken(self, image: BucketImage | None) -> Image | None:
        return Image(number=self._image, image=image) if image is not None else None

    def _begin_record(self, record: parameter_server_pb2.ReplicaRecord) -> Record | None:
        numbers = [part.bucket for part in record.parts]
        if len(set(numbers)) < len(numbers) or any(number >= len(self._shard.buckets) for number in numbers):
            raise ProtocolError(
                f"record {record.number} is for buckets {numbers[:8]} of a shard with {len(self._shard.buckets)}"
            )
        sizes = []
        for part in record.parts:
            bucket = self._shard.buckets[part.bucket]
            dtype = dtype_from_proto(part.dtype, f"record {record.number}")
            fits = part.elements == bucket.elements or bucket.kind is TensorKind.TABLE
            if part.elements and not (fits and dtype == bucket.dtype):
                raise ProtocolError(
                    f"record {record.number}: {part.elements} {dtype} elements for bucket {part.bucket}; the plan "
                    f"says {bucket.elements} {bucket.dtype}"
                )
            sizes.append(part.elements * DTYPES[dtype].itemsize)
        self._chunks = Chunks(sizes)
        return self._finished(record)

    def _chunk(self, chunk: parameter_server_pb2.ReplicaChunk) -> Record | None:
        record = self._record
        assert record is not None
        if not chunk.payload:
            raise ProtocolError(f"record {record.number} has an empty chunk of part {chunk.part}")
        self._chunks.put(chunk.part, chunk.offset, chunk.payload, f"record {record.number}, part {chunk.part}")
        return self._finished(record)

    def _finished(self, message: parameter_server_pb2.ReplicaRecord) -> Record | None:
        if not self._chunks.whole:
            self._record = message
            return None
        self._record = None
        parts = tuple(self._part(*pair) for pair in zip(message.parts, self._chunks.buffers, strict=True))
        push = _push_from_proto(message.sequence) if message.HasField("sequence") else None
        return from_message(Record, message, parts=parts, push=push)

    def _part(self, part: parameter_server_pb2.ReplicaPart, buffer: bytearray) -> RecordPart:
        bucket = self._shard.buckets[part.bucket]
        return RecordPart(
            bucket=part.bucket,
            step=part.step,
            values=buffer if part.elements else None,
            dtype=bucket.dtype,
            present=unpack_bits(part.present, len(bucket.slices), f"bucket {part.bucket}"),
            hyper=dict(part.hyper) or None,
        )
