"""Limits for the messages of each call: their length, and the number of items in them; anything beyond is refused.

A message that is too long, or can't be parsed, ends its call with a status before any handler sees it. gRPC's own limit
(MAX_MESSAGE_BYTES) applies to all calls; small messages get a small limit here, since a parsed message takes many times
its bytes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shardline.errors import ProtocolError, ShardlineError
from shardline.rpc.auth.handlers import behavior_of, same_kind

KB, MB = 1 << 10, 1 << 20

RECORD_CHUNK_BYTES = 2 * MB
"""Payload of a record for a standby in one message."""
IMAGE_CHUNK_BYTES = 1 * MB
"""Payload of a bucket's image or a checkpoint's tensor in one message."""
PARCEL_CHUNK_BYTES = 2 * MB
"""Payload of an activation or its gradient in one message."""

MAX_IDS = 64 << 10
"""Rows of a table that one call asks for."""

MAX_MESSAGE_BYTES = 64 * MB
"""Any message of any call; enforced before memory is allocated. Tensor bytes are sent in chunks of a few MB."""
DEFAULT_BYTES = 1 * MB
"""Messages of calls not listed below."""
OPEN_BYTES = 4 * KB
"""Messages of the health service, which is open to anyone."""
MESSAGE_BYTES: Mapping[str, int] = {
    # The job: about a hundred bytes per tensor, and as many per slice of the plan.
    "Chief/Join": 16 * MB,
    "ParameterServer/Configure": 64 * MB,
    # One sum per 16,384 elements of a shard.
    "Coordinator/Vote": 16 * MB,
    # Chunks of images have 1 MB, those of records 2 MB, plus the description of each slice.
    "ParameterServer/Restore": 8 * MB,
    # A chunk of 4 MB, or the names of all tensors with NaN.
    "ParameterServer/Push": 4 * MB + 512 * KB,
    "ParameterServer/PushPull": 4 * MB + 512 * KB,
    "ParameterServer/PutState": 8 * MB,
    "ParameterServer/GetState": 64 * KB,
    "Replication/Replicate": 64 * MB,
    # Chunks have 2 MB; the header holds the state of a random generator too.
    "Worker/Deliver": 3 * MB,
    "Chief/FetchCut": 8 * MAX_IDS + 4 * KB,
    # Only the caller's identity and a few numbers.
    "Chief/GetJob": 4 * KB,
    "Chief/Status": 4 * KB,
    "Places/Take": 4 * KB,
    "Access/Challenge": 4 * KB,
    "ParameterServer/OpenLane": 64 * KB,
    "Worker/OpenParcelLane": 4 * KB,
    "ParameterServer/Lead": 4 * KB,
    "ParameterServer/Activate": 4 * KB,
    "ParameterServer/Promote": 4 * KB,
    "ParameterServer/Cut": 4 * KB,
    "ParameterServer/GetCut": 4 * KB,
    "ParameterServer/Release": 4 * KB,
    "ParameterServer/Status": 4 * KB,
}
"""Limits in bytes, by the end of the method's name."""

MAX_PARCEL_BYTES = 1 << 32
"""Bytes of an activation, or of its gradient."""
MAX_PARCEL_TENSORS = 4096
"""Tensors that one stage hands to the next."""
MAX_NAME = 1024
"""Characters of the name of a task, tensor or job."""
MAX_SENTENCE = 16 * KB
"""Characters of a text for people."""
MAX_MEMBERS = 16_384
"""Tasks in one message."""
MAX_REPLICAS = 65_536
"""Replicas of a job. Sets of them are bitmaps."""
MAX_TENSORS = 262_144
MAX_DIMENSIONS = 64
"""Dimensions of a tensor; torch's limit."""
MAX_ALIASES = 1024
MAX_GROUPS = 65_536
"""Parameter groups of a rule."""
MAX_ARGUMENTS = 256
"""Arguments of one group, and numbers in one argument."""
MAX_JOB_BYTES = 1 << 40
"""Bytes of all parameters and buffers of a job: a plan with that many buckets still fits into memory."""
MAX_FIGURES = 1024
"""Named numbers in a message."""
MAX_CUTS = 1024
MAX_LEASES = 65_536
MAX_STATES = 64
"""Tensors and per-tensor numbers that an update rule keeps for one bucket, including its values."""


def at_most(count: int, limit: int, what: str) -> None:
    """Raise ProtocolError if a message has more items of a kind than allowed."""
    if count > limit:
        raise ProtocolError(f"{what}: {count} entries; the limit is {limit}")


def short(text: str, what: str, limit: int = MAX_NAME) -> str:
    """The text. Raises ProtocolError if it is longer than `limit` characters."""
    if len(text) > limit:
        raise ProtocolError(f"{what} has {len(text)} characters; the limit is {limit}")
    return text


def message_limit(method: str) -> int:
    """Most bytes of one message of a call such as "/shardline.rpc.v1.Chief/Join"."""
    service, _, call = method.rpartition("/")
    name = f"{service.rpartition('.')[2]}/{call}"
    return OPEN_BYTES if service.startswith("/grpc.health.") else MESSAGE_BYTES.get(name, DEFAULT_BYTES)


class TooLongError(ProtocolError):
    """A message has more bytes than its call allows."""

    grpc_status = "RESOURCE_EXHAUSTED"


async def _refuse(context: Any, error: ShardlineError) -> None:
    await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))


def bounded(handler: Any, method: str, limit: int) -> Any:
    """The handler with a check that refuses messages of more than `limit` bytes, and those that can't be parsed."""
    parse: Callable[[bytes], Any] = handler.request_deserializer or (lambda raw: raw)

    name = method.rpartition("/")[2]

    def read(raw: bytes) -> Any:
        if len(raw) > limit:
            raise TooLongError(f"a message of {len(raw)} bytes; the limit of {name} is {limit}")
        try:
            return parse(raw)
        except DecodeError:
            raise ProtocolError(f"a message of {name} can't be parsed; compressed ones are not taken") from None

    async def read_all(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in messages:
            yield read(raw)

    inner = behavior_of(handler)
    # Raised when the handler asks for the next message, so that the handler ends the call: it may be sending just then.
    requests_of: Callable[[Any], Any] = read_all if handler.request_streaming else read

    # gRPC distinguishes handlers that yield their replies from those that write them.
    if inspect.isasyncgenfunction(inner):

        async def replies(raw: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(inner(requests_of(raw), context)) as answer:
                    async for reply in answer:
                        yield reply
            except ShardlineError as error:
                await _refuse(context, error)

        outer: Any = replies
    else:

        async def reply(raw: Any, context: Any) -> Any:
            try:
                return await inner(requests_of(raw), context)
            except ShardlineError as error:
                await _refuse(context, error)

        outer = reply
    return same_kind(handler, outer, deserializer=None)
