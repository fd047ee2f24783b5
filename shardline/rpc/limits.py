"""How long a message of each call may be, and how much of anything it may name; what is more is refused unread.

A message that is too long, or that can't be parsed, ends its call with a status, and no handler sees it. gRPC's own
limit (MAX_MESSAGE_BYTES) holds for all calls; what is small by nature gets a small limit here, since a parsed message
takes many times its bytes.
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
"""Of a record for a standby, in one message."""
IMAGE_CHUNK_BYTES = 1 * MB
"""Of a bucket's image or a checkpoint's tensor, in one message."""

MAX_MESSAGE_BYTES = 64 * MB
"""Of one message of any call, refused before memory is taken. Tensor bytes travel in chunks of a few MB."""
DEFAULT_BYTES = 1 * MB
"""Of a message of any call that is not named below."""
OPEN_BYTES = 4 * KB
"""Of a message of the health service, which anybody may ask."""
MESSAGE_BYTES: Mapping[str, int] = {
    # What is trained: a hundred bytes a tensor, and as many a slice of the plan.
    "Chief/Join": 16 * MB,
    "ParameterServer/Configure": 64 * MB,
    # One sum for each 16,384 elements of a shard.
    "Coordinator/Vote": 16 * MB,
    # Chunks of images are 1 MB, those of records 2 MB, beside what stands for each slice.
    "ParameterServer/Restore": 8 * MB,
    "Replication/Replicate": 64 * MB,
    # Only who a call is of, and what of it.
    "Chief/GetJob": 4 * KB,
    "Chief/FetchCut": 4 * KB,
    "Chief/Status": 4 * KB,
    "Places/Take": 4 * KB,
    "Access/Challenge": 4 * KB,
    "ParameterServer/OpenLane": 64 * KB,
    "ParameterServer/Lead": 4 * KB,
    "ParameterServer/Activate": 4 * KB,
    "ParameterServer/Promote": 4 * KB,
    "ParameterServer/Cut": 4 * KB,
    "ParameterServer/GetCut": 4 * KB,
    "ParameterServer/Release": 4 * KB,
    "ParameterServer/Status": 4 * KB,
}
"""By the end of a call's name."""
OWN_READING = ("ParameterServer/Push", "ParameterServer/PushPull")
"""Calls whose frames are read by hand (shardline.wire), and whose bytes wait for room that the server has granted."""

MAX_NAME = 1024
"""Characters of a name: of a task, a tensor, a job."""
MAX_SENTENCE = 16 * KB
"""Characters of a text for people."""
MAX_MEMBERS = 16_384
"""Tasks that a message names."""
MAX_REPLICAS = 65_536
"""Of a job. Sets of them are bitmaps."""
MAX_TENSORS = 262_144
MAX_DIMENSIONS = 64
"""Of a tensor, as torch has it."""
MAX_ALIASES = 1024
MAX_GROUPS = 65_536
"""Parameter groups of a rule."""
MAX_ARGUMENTS = 256
"""Of one group, and numbers in one argument."""
MAX_JOB_BYTES = 1 << 40
"""Of all parameters and buffers of a job: a plan of as many buckets still fits into memory."""
MAX_FIGURES = 1024
"""Named numbers in a message."""
MAX_CUTS = 1024
MAX_LEASES = 65_536
MAX_STATES = 64
"""Tensors and per-tensor numbers that an update rule keeps for one bucket, its values included."""


def at_most(count: int, limit: int, what: str) -> None:
    """Raise ProtocolError where a message names more of something than there can be."""
    if count > limit:
        raise ProtocolError(f"{what}: {count} of them; the limit is {limit}")


def short(text: str, what: str, limit: int = MAX_NAME) -> str:
    """The text. Raises ProtocolError where it is too long."""
    if len(text) > limit:
        raise ProtocolError(f"{what} has {len(text)} characters; the limit is {limit}")
    return text


def message_limit(method: str) -> int | None:
    """Bytes of one message of a call such as "/shardline.rpc.v1.Chief/Join"; None = it is read by hand."""
    service, _, call = method.rpartition("/")
    name = f"{service.rpartition('.')[2]}/{call}"
    if name in OWN_READING:
        return None
    return OPEN_BYTES if service.startswith("/grpc.health.") else MESSAGE_BYTES.get(name, DEFAULT_BYTES)


class TooLongError(ProtocolError):
    """A message of more bytes than its call takes."""

    grpc_status = "RESOURCE_EXHAUSTED"


async def _refuse(context: Any, error: ShardlineError) -> None:
    await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))


def bounded(handler: Any, method: str, limit: int) -> Any:
    """A call's handler that refuses messages of more than `limit` bytes, and those that can't be parsed."""
    parse: Callable[[bytes], Any] = handler.request_deserializer or (lambda raw: raw)

    name = method.rpartition("/")[2]

    def read(raw: bytes) -> Any:
        if len(raw) > limit:
            raise TooLongError(f"a message of {len(raw)} bytes; {name} takes {limit} at most")
        try:
            return parse(raw)
        except DecodeError:
            raise ProtocolError(f"a message of {name} can't be read") from None

    async def read_all(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in messages:
            yield read(raw)

    inner = behavior_of(handler)
    # Raised where the handler asks for the next one, so that it ends the call itself: it may be sending just then.
    requests_of: Callable[[Any], Any] = read_all if handler.request_streaming else read

    # gRPC looks at what kind of function a handler is: one that yields its replies, or one that writes them.
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
