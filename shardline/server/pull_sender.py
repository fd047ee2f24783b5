"""Answers one pull: waits for each bucket's step and sends it as soon as possible."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Generic, TypeAlias, TypeVar

import torch

from shardline.codecs.base import Turn
from shardline.codecs.coding import Coding
from shardline.codecs.rows import PackedRows
from shardline.consistency.server import StepWanted
from shardline.core.fixed import fixed
from shardline.core.outcome import Outcome
from shardline.core.rows import MOST_BYTES
from shardline.core.spec import TensorKind
from shardline.core.tensor_bytes import Buffer, copy_bytes, tensor_from_bytes
from shardline.errors import DiskError, ProtocolError
from shardline.host.device_memory import settle
from shardline.host.loops import Started
from shardline.lanes.attachments import Attachment, Attachments
from shardline.rpc.limits import at_most
from shardline.rpc.messages.convert import DTYPE_TO_PROTO, hyper_to_proto
from shardline.rpc.messages.data import ON_STREAM
from shardline.rpc.v1 import data_pb2, parameter_server_pb2
from shardline.server.admission import admit_data, attachment_of, outcome_to_proto
from shardline.server.backend import Backend, HostedShard
from shardline.server.incoming_push import QUICK_BYTES, TURN_BYTES
from shardline.storage.bucket import Bucket, Intact
from shardline.storage.table import TableBucket
from shardline.waist import CHUNK_BYTES, Memory, refuse_rows

STATES_PER_FRAME = 16
"""Maximum number of buckets in one message, so that a worker begins with the first while the last are still applied."""
GATHER_S = 0.002
"""Seconds that a bucket that can be referred to waits for those behind it."""
REPLIES = 2
"""Number of the shared area for replies to a single worker."""
DEFAULT_WAIT_S = 10.0
MAX_WAIT_S = 600.0


@fixed()
class Encoded:
    """One bucket ready to be sent."""

    state: data_pb2.BucketState
    payload: Buffer
    raw_bytes: int
    intact: Intact | None = None
    """Whether the payload, a view of published parameters, has not been overwritten; None = it is a copy."""


def parse_step_wanted(request: data_pb2.PullRequest) -> StepWanted:
    """The wanted step. Raises ProtocolError for wants of later versions."""
    if request.what not in (data_pb2.PULL_WHAT_UNSPECIFIED, data_pb2.PULL_WHAT_PARAMS):
        # By number: this version may have no name for it.
        raise ProtocolError(f"this ps does not support a pull with what = {request.what}")
    have = request.have_step if request.HasField("have_step") else None
    match request.WhichOneof("want"):
        case "exact_step":
            return StepWanted(step=request.exact_step, have=have, task=request.data.task)
        case "at_least_step":
            return StepWanted(step=request.at_least_step, at_least=True, have=have, task=request.data.task)
        case "latest":
            return StepWanted(step=None, have=have, task=request.data.task)
        case other:
            raise ProtocolError(f"pull without a want that this version knows ({other})")


def wanted_buckets(shard: HostedShard, request: data_pb2.PullRequest) -> list[int]:
    """Requested buckets in order. Raises ProtocolError for an unknown or repeated bucket."""
    for number in request.buckets:
        if number >= len(shard.buckets):
            raise ProtocolError(
                f"shard {shard.number} has {len(shard.buckets)} buckets; the pull asks for bucket {number}"
            )
    if len(set(request.buckets)) < len(request.buckets):
        raise ProtocolError(f"shard {shard.number}: the pull asks for a bucket twice")
    return list(request.buckets) or list(range(len(shard.buckets)))


def refer_bucket(
    shard: HostedShard, want: StepWanted, coding: Coding, attachment: Attachment | None, number: int
) -> Encoded | Outcome:
    """A bucket's published values of a step, not copied, or the reason why not. Takes no lock, so the loop may run it.

    theta_t stays in its buffer until every replica has pushed t + 1, and a replica does so only after it has read
    theta_t. A worker that is overtaken all the same learns it from `intact` and is not waited for any more.
    """
    bucket = shard.buckets[number]
    if not bucket.initialized:
        return Outcome.NOT_CONFIGURED
    assert want.step is not None
    intact = bucket.writes.intact(want.step)
    # The step is written last when a step is applied, so everything that it says is published is complete.
    outcome = shard.mode.serve(bucket, want)
    if outcome is not Outcome.SERVED:
        return outcome
    if want.step <= bucket.overwritten:
        return Outcome.OVERTAKEN
    changed_step = bucket.changed_step
    state = bucket_state(bucket, want.step)
    stands = want.have is not None and changed_step <= want.have <= want.step
    if stands or bucket.spec.kind is TensorKind.TABLE:
        state.unchanged = True
        return Encoded(state, b"", 0)
    state.codec, state.payload_bytes = coding.name, bucket.spec.nbytes
    place = attachment.published(number, want.step) if attachment is not None else None
    if place is not None:
        state.area, state.offset = place
        return Encoded(state, b"", bucket.spec.nbytes)
    return Encoded(state, bucket.bytes_at(want.step), bucket.spec.nbytes, intact)


def may_refer(shard: HostedShard, want: StepWanted, coding: Coding, attachment: Attachment | None) -> bool:
    """Whether refer_bucket may be used: an exact step, not encoded, in host memory or where the worker reads it."""
    if not shard.lends or want.step is None or want.at_least or not coding.is_view:
        return False
    return shard.on_host or (attachment is not None and attachment.published(0, want.step) is not None)


def bucket_state(bucket: Bucket, step: int) -> data_pb2.BucketState:
    state, spec = data_pb2.BucketState(), bucket.spec
    state.bucket, state.step, state.version = bucket.number, step, bucket.version
    state.dtype, state.elements = DTYPE_TO_PROTO[spec.dtype], spec.elements
    return state


Into = Callable[[int, int], tuple[int, Memory] | None]
"""(bucket, bytes) -> (offset in area 2, memory) for a copy that the caller can read, or None."""


def published_step(shard: HostedShard, bucket: Bucket, want: StepWanted) -> int | Outcome:
    """The step whose values answer a pull now, or why none does. Call with the bucket's lock held."""
    if not bucket.initialized:
        return Outcome.NOT_CONFIGURED
    outcome = shard.mode.serve(bucket, want)
    if outcome is not Outcome.SERVED:
        return outcome
    step = bucket.step if want.step is None or want.at_least else want.step
    # The step after the next one may be being published.
    return Outcome.OVERTAKEN if step <= bucket.overwritten else step


def encode_bucket(
    shard: HostedShard, number: int, want: StepWanted, coding: Coding, into: Into = lambda bucket, nbytes: None
) -> Encoded | Outcome:
    """Copy and encode one bucket for a task under its lock, or return why not. Runs in the pool."""
    bucket = shard.buckets[number]
    with bucket.lock:
        step = published_step(shard, bucket, want)
        if isinstance(step, Outcome):
            return step
        state, written = bucket_state(bucket, step), coding.bucket(shard.number, number)
        stands = want.have is not None and bucket.changed_step <= want.have <= step
        if bucket.spec.kind is TensorKind.TABLE or (stands and not written.codec.memory.shared):
            state.unchanged = True
            return Encoded(state, b"", 0)
        changed, memory = bucket.changed_step, coding.memory(shard.number, number, want.task)
        turn = Turn(step, seed=coding.seed, receiver=want.task, base=want.have, changed=changed, memory=memory)
        # The only copy is made under the lock, so no reader sees a torn bucket.
        answer, size = bucket.answer(step, want.task), bucket.spec.nbytes
        there = into(number, size) if written.codec.is_view and not shard.on_host else None
        if there is not None and isinstance(there[1], torch.Tensor):
            # The worker reads the same device.
            there[1].copy_(answer.view(torch.uint8))
            settle(bucket.device)
            state.area, state.offset, state.codec, state.payload_bytes = REPLIES, there[0], written.name, size
            return Encoded(state, b"", size)
        values = answer.cpu()
        payload: Buffer = written.coder.encode(values, turn)
        if stands and written.codec.memory.keeps(want.have, step):
            # The step is in the memory all the same, which all receivers share.
            state.unchanged = True
            return Encoded(state, b"", 0)
        coding.measure(shard.number, number, values, payload, turn)
        size = len(payload)
        slot = into(number, size) if size else None
        if slot is None:
            payload = bytes(payload)
        else:
            state.area, state.offset = REPLIES, slot[0]
            assert not isinstance(slot[1], torch.Tensor), "memory of a device is offered for values as they are"
            copy_bytes(memoryview(slot[1]), payload)
            payload = b""
    state.codec = written.name
    state.payload_bytes = size
    return Encoded(state, payload, bucket.spec.nbytes)


def encode_rows(
    shard: HostedShard, number: int, *, want: StepWanted, coding: Coding, ids: torch.Tensor
) -> Encoded | Outcome:
    """Copy rows of a table under its bucket's lock and encode them, or return why not. Runs in the pool."""
    bucket = shard.buckets[number]
    assert isinstance(bucket, TableBucket)
    with bucket.lock:
        step = published_step(shard, bucket, want)
        if isinstance(step, Outcome):
            return step
        try:
            state, rows = bucket_state(bucket, step), bucket.rows(ids, step)
        except DiskError as error:
            shard.storage.observers.on_failure(error)
            raise
    written = coding.bucket(shard.number, number)
    assert isinstance(written.coder, PackedRows)
    payload = written.coder.encode_rows(rows, Turn(step, seed=coding.seed, receiver=want.task))
    state.codec, state.payload_bytes = written.name, len(payload)
    return Encoded(state, payload, rows.nbytes)


def wanted_rows(shard: HostedShard, request: data_pb2.PullRequest) -> dict[int, torch.Tensor]:
    """Ids of the requested rows, by bucket. Raises ProtocolError."""
    found = {}
    for item in request.rows:
        if item.bucket >= len(shard.buckets) or not isinstance(bucket := shard.buckets[item.bucket], TableBucket):
            raise refuse_rows(item.bucket)
        found[item.bucket] = ids = tensor_from_bytes(bytes(item.ids), "int64")
        at_most(len(ids) * bucket.dim * 4, MOST_BYTES, f"bytes of rows of table {bucket.table!r} in one pull")
    return found


R = TypeVar("R", parameter_server_pb2.PullReply, data_pb2.PushPullReply)
New: TypeAlias = Callable[[], tuple[R, data_pb2.PullFrame]]
"""Makes an empty message of the call that a pull is answered in, and its frame."""


def in_pull() -> tuple[parameter_server_pb2.PullReply, data_pb2.PullFrame]:
    reply = parameter_server_pb2.PullReply()
    return reply, reply.frame


def in_push_pull() -> tuple[data_pb2.PushPullReply, data_pb2.PullFrame]:
    reply = data_pb2.PushPullReply()
    return reply, reply.pull


def framed(new: New[R], encoded: Encoded) -> Iterator[tuple[R, data_pb2.PullFrame, bool]]:
    """One message per chunk, with its frame, and whether it is the last; the state and the first chunk share one."""
    size = len(encoded.payload)
    for offset in range(0, max(size, 1), CHUNK_BYTES):
        reply, frame = new()
        if offset == 0:
            frame.bucket.CopyFrom(encoded.state)
        if size:
            frame.chunk.bucket, frame.chunk.offset = encoded.state.bucket, offset
            # Bytes that are all of one chunk are not copied for it.
            frame.chunk.payload = bytes(encoded.payload[offset : offset + CHUNK_BYTES])
        yield reply, frame, offset + CHUNK_BYTES >= size


def pull_end(
    backend: Backend, shard: HostedShard | None, outcome: Outcome, reason: str = "", buckets: Collection[int] = ()
) -> data_pb2.PullEnd:
    """The PullEnd message of a pull of some buckets; () = all."""
    end = data_pb2.PullEnd()
    end.outcome, end.reason, end.timeline = outcome_to_proto(outcome), reason, backend.timeline
    _tell_state(end, shard, outcome, buckets)
    return end


def _tell_state(
    end: data_pb2.PullEnd, shard: HostedShard | None, outcome: Outcome, buckets: Collection[int] = ()
) -> None:
    """Set what the end says of the shard."""
    if shard is not None:
        end.step, end.version = shard.position
        if outcome is Outcome.WAITING:
            end.waiting_for.extend(shard.mode.waiting_for())
        if shard.summing is not None:
            end.wants_state = shard.summing.wants_state(buckets)
            end.hyper.extend(hyper_to_proto(shard.summing.hyper))


def end_message(new: New[R], end: data_pb2.PullEnd) -> R:
    reply, frame = new()
    frame.end.CopyFrom(end)
    return reply


async def pull(
    backend: Backend, attachments: Attachments, request: data_pb2.PullRequest, *, new: New[R]
) -> AsyncIterator[R]:
    """Messages of a pull's answer, sent as buckets become ready, in the requested order."""
    try:
        async for message in _pull(backend, attachments, request, new):
            yield message
    except _UnservedError as end:
        yield end_message(new, pull_end(backend, end.shard, end.outcome, end.reason))
    except Torn as error:
        # Overwritten while it was sent: nobody waits any more for the worker that requested this step.
        yield end_message(new, pull_end(backend, None, Outcome.OVERTAKEN, str(error)))


def ready_reply(
    backend: Backend, attachment: Attachment, request: data_pb2.PullRequest, reply: data_pb2.PushPullReply
) -> bool:
    """Put the whole answer of a pull into a reply, if all that it asks for can be referred to now; False = see pull().

    The request is admitted, and the attachment is its sender's. Bytes that don't stay in place are sent if they are
    few. Raises ProtocolError.
    """
    shard, want, started_s = backend.shard(request.data.shard), parse_step_wanted(request), time.monotonic()
    _wait_s(request)
    coding = backend.coding.pull
    wanted = wanted_buckets(shard, request)
    if not wanted or request.rows or not may_refer(shard, want, coding, attachment):
        return False
    buckets, raw_bytes, wire_bytes = [], 0, 0
    for number in wanted:
        found = refer_bucket(shard, want, coding, attachment, number)
        if isinstance(found, Outcome):
            return False
        buckets.append(found)
        raw_bytes += found.raw_bytes
        wire_bytes += len(found.payload)
        if wire_bytes > QUICK_BYTES:
            return False
    reply.pull.buckets.extend([found.state for found in buckets])
    end = reply.pull.end
    end.outcome, end.timeline = outcome_to_proto(Outcome.SERVED), backend.timeline
    _tell_state(end, shard, Outcome.SERVED, wanted)
    for found in buckets if wire_bytes else ():
        if len(found.payload):
            # They are queued; who asked for them waits for them, so there is no need to wait here.
            Started(attachment.send(found.payload, found.intact)).close()
    backend.count(pull_raw=raw_bytes, pull_wire=wire_bytes)
    backend.pulled(request.data.task, coding.name, attachment.lane, raw_bytes, wire_bytes, time.monotonic() - started_s)
    return True


class _UnservedError(Exception):
    """Ends a pull before all requested buckets are sent."""

    def __init__(self, shard: HostedShard | None, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.shard = shard
        self.outcome = outcome
        self.reason = reason


async def _pull(
    backend: Backend, attachments: Attachments, request: data_pb2.PullRequest, new: New[R]
) -> AsyncIterator[R]:
    decision = admit_data(backend, request.data, init=False)
    if decision.outcome is not Outcome.SERVED:
        raise _UnservedError(None, decision.outcome, decision.reason)
    shard = backend.shard(request.data.shard)
    want = parse_step_wanted(request)
    wanted = wanted_buckets(shard, request)
    wait_s = _wait_s(request)
    deadline_s = time.monotonic() + wait_s
    generation = backend.generation
    coding = backend.coding.pull
    attachment = attachment_of(attachments, request.data)
    out = PullWriter(attachment, new)
    served = functools.partial(out.served, backend, shard, request.data.task, coding.name, wanted)
    find = _finder(backend, shard, want, coding, attachment, wanted_rows(shard, request))
    for number in wanted:
        while True:
            if generation != backend.generation or request.data.timeline != backend.timeline:
                raise _UnservedError(shard, Outcome.WRONG_TIMELINE, "the timeline changed during this pull")
            signal = backend.signal(shard.number, number)
            assert signal is not None, "the generation is that of the shard"
            waiter = signal.arm()
            found = find(number)
            encoded = found if isinstance(found, (Encoded, Outcome)) else await found
            if isinstance(encoded, Encoded):
                signal.disarm(waiter)
                break
            # Send ready buckets before waiting for others.
            async for frame in out.flush():
                yield frame
            never = _never(shard, want, number, encoded)
            if never is not None:
                signal.disarm(waiter)
                raise _UnservedError(shard, *never)
            left_s = deadline_s - time.monotonic()
            gathers = attachment is not None and attachment.borrowed
            if left_s > 0 and gathers and await signal.wait(waiter, left_s):
                # Those behind it usually follow at once: a message for each would cost more than the buckets
                # themselves.
                last = wanted[min(wanted.index(number) + STATES_PER_FRAME, len(wanted)) - 1]
                await _published(backend, shard, last, want)
            elif left_s <= 0 or gathers or not await signal.wait(waiter, left_s):
                signal.disarm(waiter)
                reason = f"{_lacks(shard, want)} at shard {shard.number} after {wait_s:.1f} s"
                raise _UnservedError(shard, Outcome.WAITING, reason)
        await shard.answerable()
        backend.count(pull_raw=encoded.raw_bytes, pull_wire=len(encoded.payload))
        async for frame in out.add(encoded, served if number == wanted[-1] else None):
            yield frame
    if not wanted:
        yield end_message(new, served())


def _wait_s(request: data_pb2.PullRequest) -> float:
    if not 0.0 <= request.wait_s <= MAX_WAIT_S:
        raise ProtocolError(f"wait_s is {request.wait_s}; it must be between 0 and {MAX_WAIT_S:.0f} seconds")
    return request.wait_s or DEFAULT_WAIT_S


Find = Callable[[int], Encoded | Outcome | Awaitable[Encoded | Outcome]]


def _finder(
    backend: Backend,
    shard: HostedShard,
    want: StepWanted,
    coding: Coding,
    attachment: Attachment | None,
    rows: Mapping[int, torch.Tensor],
) -> Find:
    """How to get the buckets of a pull: in place, or copied by the pool. rows: from wanted_rows()."""
    if rows:
        return _Rows(backend, shard, want, coding, rows)
    if may_refer(shard, want, coding, attachment):
        return functools.partial(refer_bucket, shard, want, coding, attachment)
    into = attachment.reply_slot if attachment is not None else _no_slot
    return lambda number: backend.work(encode_bucket, shard, number, want, coding, into)


def _never(shard: HostedShard, want: StepWanted, number: int, found: Outcome) -> tuple[Outcome, str] | None:
    """Why waiting for a bucket is pointless; None if it may still come."""
    if found is not Outcome.WAITING:
        at = shard.buckets[number].step
        return found, f"step {want.step} of bucket {number} is no longer available; the bucket is at step {at}"
    if shard.stop_step is not None and want.step is not None and want.step > shard.stop_step:
        return Outcome.STOPPED, f"the job stops at step {shard.stop_step}"
    return None


def _lacks(shard: HostedShard, want: StepWanted) -> str:
    what = f"step {want.step}" if want.step is not None else "a pull"
    return f"{what} is waiting for {shard.mode.late()}"


async def _published(backend: Backend, shard: HostedShard, number: int, want: StepWanted) -> None:
    """Wait until a bucket has reached the wanted step, but GATHER_S seconds at most."""
    signal = backend.signal(shard.number, number)
    if signal is None:
        # The server was reconfigured.
        return
    waiter = signal.arm()
    if want.step is None or shard.buckets[number].step >= want.step:
        signal.disarm(waiter)
    else:
        await signal.wait(waiter, GATHER_S)


class _Rows:
    """The rows that a pull names, by bucket, some ahead: a turn of the pool takes longer than many a table's rows."""

    def __init__(
        self, backend: Backend, shard: HostedShard, want: StepWanted, coding: Coding, rows: Mapping[int, torch.Tensor]
    ) -> None:
        self._backend, self._rows = backend, rows
        self._encode = functools.partial(encode_rows, shard, want=want, coding=coding)
        self._ahead: dict[int, Encoded] = {}

    def __call__(self, number: int) -> Encoded | Awaitable[Encoded | Outcome]:
        if number not in self._rows:
            raise ProtocolError(f"bucket {number} is in a pull of rows, which names none of it")
        return self._ahead.pop(number, None) or self._backend.work(self._encode_from, number)

    def _encode_from(self, number: int) -> Encoded | Outcome:
        numbers = list(self._rows)
        wanted = self._encode(number, ids=self._rows[number])
        last, nbytes = wanted, 0
        for later in numbers[numbers.index(number) + 1 :]:
            if isinstance(last, Outcome) or (nbytes := nbytes + last.raw_bytes) > TURN_BYTES:
                break
            last = self._encode(later, ids=self._rows[later])
            if isinstance(last, Encoded):
                self._ahead[later] = last
        return wanted


def _no_slot(bucket: int, nbytes: int) -> None:
    return None


class Torn(Exception):
    """The data being sent has been overwritten by a later step."""


MakeEnd = Callable[[], data_pb2.PullEnd]
"""Called once, when the message with the end is written."""


class PullWriter(Generic[R]):
    """Outgoing pulled buckets: as chunks, or as states if the bytes travel by the attachment.

    A message holds a copy of its chunk, so that nothing queued for sending is a view of parameters. The pull's end is
    part of the last message: each message costs both sides more than a small bucket does.
    """

    def __init__(self, attachment: Attachment | None, new: New[R]) -> None:
        self._attachment = attachment
        self._new: New[R] = new
        self._kept: list[Encoded] = []
        self._began_s = time.monotonic()
        self.raw_bytes = 0
        self.wire_bytes = 0

    def served(
        self, backend: Backend, shard: HostedShard, task: str, codec: str, buckets: Collection[int] = ()
    ) -> data_pb2.PullEnd:
        """Note that a task's pull of these buckets, () = all, is answered in full, and make its end."""
        lane = self._attachment.lane if self._attachment is not None else ON_STREAM.lane
        backend.pulled(task, codec, lane, self.raw_bytes, self.wire_bytes, time.monotonic() - self._began_s)
        return pull_end(backend, shard, Outcome.SERVED, buckets=buckets)

    async def add(self, encoded: Encoded, end: MakeEnd | None = None) -> AsyncIterator[R]:
        """Messages to send now; states may be kept for the next message, unless there is an end. Raises Torn."""
        self.raw_bytes += encoded.raw_bytes
        self.wire_bytes += len(encoded.payload)
        if self._attachment is None:
            for message, frame, last in framed(self._new, encoded):
                if end is not None and last:
                    frame.end.CopyFrom(end())
                if encoded.intact is not None and not encoded.intact():
                    raise Torn(f"step {encoded.state.step} of bucket {encoded.state.bucket} is no longer available")
                yield message
            return
        self._kept.append(encoded)
        if end is not None or len(self._kept) >= STATES_PER_FRAME:
            async for message in self.flush(end):
                yield message

    async def flush(self, end: MakeEnd | None = None) -> AsyncIterator[R]:
        """A message with the kept states, if any; sends their bytes."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        sent = [encoded for encoded in kept if len(encoded.payload)]
        message, frame = self._new()
        frame.buckets.extend([encoded.state for encoded in kept])
        if end is not None and not sent:
            frame.end.CopyFrom(end())
        # The peer must know of the bytes before they arrive.
        yield message
        assert self._attachment is not None
        for encoded in sent:
            await self._attachment.send(encoded.payload, encoded.intact)
        if end is not None and sent:
            yield end_message(self._new, end())


class AsyncReply:
    """Copies of all buckets, made under the shard's lock after an asynchronous push, for the pull of that call."""

    def __init__(
        self, request: data_pb2.PullRequest, shard: HostedShard, coding: Coding, attachment: Attachment | None
    ) -> None:
        self._want = parse_step_wanted(request)
        self._numbers = wanted_buckets(shard, request)
        self._coding = coding
        self._attachment = attachment
        self._into = attachment.reply_slot if attachment is not None else _no_slot
        self._task = request.data.task
        self.buckets: list[Encoded] = []
        self.copied = False
        """False until a push of this call was decided on, which a fenced or malformed one never is."""

    def copy(self, shard: HostedShard) -> None:
        """Copy the buckets. Call with the shard's lock held."""
        self.buckets, self.copied = [], True
        for number in self._numbers:
            want = replace(self._want, step=None, at_least=False)
            encoded = encode_bucket(shard, number, want, self._coding, self._into)
            if isinstance(encoded, Encoded):
                self.buckets.append(encoded)

    async def messages(self, backend: Backend, shard: HostedShard) -> AsyncIterator[data_pb2.PushPullReply]:
        out = PullWriter(self._attachment, in_push_pull)
        served = functools.partial(out.served, backend, shard, self._task, self._coding.name)
        for encoded in self.buckets:
            backend.count(pull_raw=encoded.raw_bytes, pull_wire=len(encoded.payload))
            async for frame in out.add(encoded, served if encoded is self.buckets[-1] else None):
                yield frame
                # Let other calls of this loop run between large frames.
                await asyncio.sleep(0)
        if not self.buckets:
            yield end_message(in_push_pull, served())
