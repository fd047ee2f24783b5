"""One push stream: frames in, complete buckets out. Everything is checked against the plan before it counts."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from shardline.codecs.coding import Coding
from shardline.codecs.rows import PLAIN
from shardline.consistency.server import NumberedPush
from shardline.core.contributions import none_present
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import BucketSpec
from shardline.core.spec import TensorKind
from shardline.errors import ProtocolError, TensorError
from shardline.lanes.attachments import Attachment, Attachments
from shardline.rpc.limits import MAX_GROUPS, at_most
from shardline.rpc.messages.convert import DTYPE_TO_PROTO, dtype_from_proto, hyper_from_proto, unpack_bits
from shardline.rpc.messages.data import ON_STREAM, lane_name
from shardline.rpc.v1 import data_pb2
from shardline.server.admission import admit_push, attachment_of, drop_named, outcome_to_proto
from shardline.server.backend import Backend, HostedShard
from shardline.server.calls import all_ended
from shardline.server.incoming_push import (
    NO_BYTES,
    TURN_BYTES,
    IncomingPush,
    PushResult,
    Slot,
    applies_inline,
    gradient_kind,
    held_bytes,
    opened,
    release_all,
    room_wanted,
    stands_inline,
    worst_of,
)
from shardline.server.pace import Runner
from shardline.server.staging import Ask, AsyncPush, StagingLease

SENT_AWAY = (Outcome.FENCED, Outcome.WRONG_TIMELINE, Outcome.NOT_CONFIGURED)
"""Outcomes for a worker that was admitted before: they end its lane."""


class NoRoomError(Exception):
    """A push found no room in staging while its call could wait; `result` is the answer to its sender.

    Complete buckets are counted; the sender repeats the whole push.
    """

    def __init__(self, result: PushResult) -> None:
        super().__init__(result.ack.reason)
        self.result = result


class PushReceiver:
    """Processes the frames of one stream, which may carry several pushes one after another.

    attachments: lanes by which referred bytes may arrive.
    async_reply: called under the shard's lock when an asynchronous push is applied, to copy what a pull of the same
    call returns.
    spawn: starts the task that takes referred buckets; its error must end the call.
    on_admitted(task, incarnation): called with the sender of every admitted push.
    """

    def __init__(
        self,
        backend: Backend,
        attachments: Attachments,
        *,
        async_reply: Callable[[HostedShard], None] = lambda shard: None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_admitted: Callable[[str, int], None] = lambda task, incarnation: None,
    ) -> None:
        self._backend = backend
        self._attachments = attachments
        self._async_reply = async_reply
        self._spawn = spawn
        self._on_admitted = on_admitted
        self._push: IncomingPush | None = None
        self._slot: Slot | None = None
        self._waited_s = 0.0
        """Seconds waited for room in staging over the whole stream, since the sender's deadline covers all of it."""

    async def feed(self, frame: data_pb2.PushFrame) -> PushResult | None:
        """Process one frame; returns the result if it ended a push.

        Raises ProtocolError or TensorError, and NoRoomError if others occupy the room.
        """
        if frame.HasField("header"):
            self._begin(frame.header)
        push = self._push
        if push is None:
            raise ProtocolError("a push must start with a header frame")
        if push.rejected is None:
            if frame.HasField("bucket"):
                slot = self._begin_bucket(push, frame.bucket)
                await self._reserve(push, slot)
            if frame.HasField("chunk"):
                self._chunk(frame.chunk)
            if frame.HasField("bucket_commit"):
                self._end_bucket(push, frame.bucket_commit)
            if frame.refs:
                self._refer(push, frame.refs, last=frame.HasField("commit"))
        if frame.HasField("commit"):
            if push.rejected is not None:
                self._push = None
                return self._result(push, push.rejected, 0)
            if self._slot is not None:
                raise ProtocolError(f"the push was committed while bucket {self._slot.number} was open")
            if frame.commit.empty_buckets:
                self._take_empty(push, frame.commit.empty_buckets)
            push.committed = True
            if push.more is not None:
                push.more.set()
            if push.draining is not None:
                await push.draining
            elif push.attachment is not None:
                await self._drain(push, push.attachment)
            self._push = None
            try:
                return await self._counted(push, frame.commit)
            finally:
                if not push.applying:
                    push.release()
        return None

    def _begin(self, header: data_pb2.PushHeader) -> None:
        if self._push is not None:
            raise ProtocolError("a new push began before the previous one was committed")
        kind = header.kind or data_pb2.PUSH_KIND_GRADIENT
        if kind not in (data_pb2.PUSH_KIND_GRADIENT, data_pb2.PUSH_KIND_INIT):
            raise ProtocolError(f"this ps does not support push kind number {kind}")
        decision = admit_push(self._backend, header, init=kind == data_pb2.PUSH_KIND_INIT)
        if decision.outcome is not Outcome.SERVED:
            if decision.outcome in SENT_AWAY:
                # Nobody will take the bytes that follow on another lane.
                drop_named(self._attachments, header.data, "a push over it was not admitted")
            # No shard is looked up, so there is none to store.
            self._push = IncomingPush(header, None, {}, self._backend.generation, rejected=decision)  # type: ignore[arg-type]
            return
        self._on_admitted(header.data.task, header.data.incarnation)
        shard = self._backend.shard(header.data.shard)
        if header.weight not in (0.0, 1.0):
            raise ProtocolError(f"weight {header.weight}: this job weights all gradients equally; send 0 or 1")
        if header.nonfinite_tensors:
            # The loss is listed among them.
            at_most(len(header.nonfinite_tensors), shard.tensors + 1, "tensors with NaN listed in a push")
        at_most(len(header.hyper), MAX_GROUPS, "parameter groups listed in a push")
        push = IncomingPush(header, shard, hyper_from_proto(header.hyper), self._backend.generation)
        push.coding, push.usual = self._coding(header), self._backend.coding.push
        push.attachment = attachment_of(self._attachments, header.data)
        self._push = push
        if push.number is None and push.gradient and header.block.count == 0:
            raise ProtocolError("a synchronous push must name its block of replicas")
        if header.empty_buckets:
            self._take_empty(push, header.empty_buckets)
        if push.number is not None:
            coming = [bucket.number for bucket in shard.buckets if bucket.number not in push.done]
            push.room = AsyncPush(sum(held_bytes(push, push.coding.bucket(shard.number, n)) for n in coming))

    def _coding(self, header: data_pb2.PushHeader) -> Coding:
        """Coding of a push: the job's codec; raw for initial values. Raises ProtocolError."""
        coding = self._backend.coding
        if not gradient_kind(header):
            return coding.plain
        try:
            return coding.of_push(header.codec)
        except ProtocolError as error:
            raise ProtocolError(f"shard {header.data.shard}: {error}") from None

    def _take_empty(self, push: IncomingPush, numbers: Sequence[int]) -> None:
        """Count buckets without bytes, or keep them until the whole push is there."""
        found: dict[int, Gradient] = {}
        for number in numbers:
            spec = self._check_bucket(push, number)
            push.done.add(number)
            found[number] = Gradient(None, none_present(spec))
        if push.number is not None:
            push.staged.update(found)
            return
        if stands_inline(push.shard, found):
            for number, gradient in found.items():
                push.decisions[number] = self._count(push, number, gradient, ())
            return

        async def count() -> None:
            for number, gradient in found.items():
                push.decisions[number] = await self._backend.work(self._count, push, number, gradient, ())

        push.running.append(asyncio.create_task(count()))

    def _check_bucket(self, push: IncomingPush, number: int) -> BucketSpec:
        buckets = push.shard.buckets
        if number >= len(buckets):
            raise TensorError(f"shard {push.shard.number} has {len(buckets)} buckets; the push is for bucket {number}")
        if number in push.done:
            raise ProtocolError(f"shard {push.shard.number}: bucket {number} appears twice in one push")
        return buckets[number].spec

    async def _reserve(self, push: IncomingPush, slot: Slot, *, at_once: bool = False) -> None:
        """Room for one bucket of a push. Raises NoRoomError; with `at_once`, TimeoutError if there is none now."""
        nbytes = held_bytes(push, slot.coding)
        if nbytes:
            push.slots.append(slot)
            ask = room_wanted(push, slot.number, nbytes)
            slot.lease = self._backend.staging.lend(ask) or await self._room(push, ask, at_once=at_once)
            if push.attachment is None or push.attachment.borrowed:
                self._backend.buffers.fit()

    async def _room(self, push: IncomingPush, ask: Ask, *, at_once: bool) -> StagingLease:
        """Wait for room, within the stream's remaining patience or `at_once`; see _reserve()."""
        patience_s = 0.0 if at_once else max(0.0, self._backend.staging_wait_s - self._waited_s)
        began_s = time.monotonic()
        try:
            return await self._backend.staging.reserve(ask, patience_s)
        except TimeoutError as error:
            if at_once:
                raise
            decision = Decision(Outcome.WAITING, f"{error} {await self._held_up_by(push)}")
            raise NoRoomError(self._result(push, decision, 0)) from None
        finally:
            self._waited_s += time.monotonic() - began_s

    async def _held_up_by(self, push: IncomingPush) -> str:
        """What the push is waiting for, and what the user can do."""
        if not push.summed:
            return "Unfinished pushes of other workers use it; this push is retried"
        late = await self._backend.work(push.shard.mode.late)
        return (
            f"Step {push.shard.step_min} is waiting for {late}: check what delays their workers; "
            "this push is retried until then"
        )

    # Buckets on the stream

    def _begin_bucket(self, push: IncomingPush, header: data_pb2.BucketHeader) -> Slot:
        if self._slot is not None:
            raise ProtocolError(f"bucket {header.bucket} began before bucket {self._slot.number} was committed")
        if push.attachment is not None:
            raise ProtocolError(
                f"bucket {header.bucket} arrived on the stream, but the push is on lane {push.attachment.lane}"
            )
        self._slot = slot = self._announced(push, header)
        return slot

    def _announced(self, push: IncomingPush, header: data_pb2.BucketHeader) -> Slot:
        """The slot of a bucket whose header fits the plan, without memory. Raises ProtocolError, TensorError."""
        number, size, codings = header.bucket, header.payload_bytes, push.coding
        assert codings is not None
        spec = self._check_bucket(push, number)
        coding = codings.bucket(push.shard.number, number)
        if header.elements != spec.elements or header.dtype != DTYPE_TO_PROTO[spec.dtype]:
            where = _where(push, number)
            raise TensorError(
                f"{where} ({push.shard.buckets[number].names[0]!r}): pushed as {header.elements} "
                f"{dtype_from_proto(header.dtype, where)} elements; the plan says {spec.elements} {spec.dtype}. Does "
                "the worker have another model?"
            )
        if misfit := coding.misfit(size):
            raise TensorError(
                f"{_where(push, number)} ({push.shard.buckets[number].names[0]!r}): payload of {size} bytes "
                f"announced, {misfit}"
            )
        count = len(spec.slices)
        nonfinite, present, bound = header.nonfinite_tensors, header.present, header.bound
        if len(nonfinite) > count:
            at_most(len(nonfinite), count, f"{_where(push, number)}: tensors with NaN")
        return Slot(
            number,
            spec,
            coding,
            unpack_bits(present, count, _where(push, number)) if present else (True,) * count,
            NO_BYTES,
            size=size,
            nonfinite=tuple(nonfinite),
            bound=bound if bound > 0.0 else math.inf,
            fingerprint=header.fingerprint,
        )

    def _chunk(self, chunk: data_pb2.Chunk) -> None:
        slot = self._slot
        if slot is None or chunk.bucket != slot.number:
            raise ProtocolError(f"chunk of bucket {chunk.bucket} without a bucket header")
        slot.add(chunk.offset, chunk.payload)

    def _end_bucket(self, push: IncomingPush, commit: data_pb2.BucketCommit) -> None:
        slot = self._slot
        if slot is None or commit.bucket != slot.number:
            raise ProtocolError(f"bucket {commit.bucket} was committed before it began")
        if slot.filled != slot.size or commit.bytes != slot.filled or commit.chunks != slot.chunks:
            raise ProtocolError(
                f"bucket {slot.number}: committed with {commit.bytes} bytes in {commit.chunks} chunks, received "
                f"{slot.filled} of {slot.size} in {slot.chunks}; nothing was changed"
            )
        slot.digest = commit.digest
        self._slot = None
        push.done.add(slot.number)
        self._weigh(push, slot, slot.filled)
        self._take_slots(push, [slot])

    @staticmethod
    def _weigh(push: IncomingPush, slot: Slot, wire_bytes: int) -> None:
        push.wire_bytes += wire_bytes
        # How many rows a table's bucket has is known to those who decode it.
        push.raw_bytes += slot.size if slot.spec.kind is TensorKind.TABLE else slot.spec.nbytes

    # Referred buckets

    def _refer(self, push: IncomingPush, refs: Sequence[data_pb2.BucketRef], *, last: bool) -> None:
        """Announce buckets whose bytes come by the push's attachment, in this order. last: the stream ends here."""
        if push.attachment is None:
            raise ProtocolError("the push refers to bytes in an attachment, but its header names none")
        for ref in refs:
            slot = self._announced(push, ref.bucket)
            push.done.add(slot.number)
            slot.digest, slot.offset, slot.borrowed = ref.digest, ref.offset, push.attachment.borrowed
            slot.moved = not push.attachment.borrowed
            push.referred.append(slot)
        if push.more is not None:
            push.more.set()
        elif not last:
            push.more = asyncio.Event()
            push.draining = self._spawn(self._drain(push, push.attachment))

    async def _drain(self, push: IncomingPush, attachment: Attachment) -> None:
        """Receive referred buckets, a window of them at a time, and hand them on as they are complete."""
        with self._backend.pace.run(push.race) if push.race else nullcontext() as runner:
            await self._receive(push, attachment, runner)

    async def _receive(self, push: IncomingPush, attachment: Attachment, runner: Runner | None) -> None:
        """See _drain(). runner: None = the push keeps pace with nobody."""
        coming: deque[Slot] = deque()
        while True:
            while push.referred and len(coming) < attachment.window and (runner is None or runner.may_expect()):
                slot = push.referred[0]
                try:
                    # Don't wait while other buckets of this push arrive: they have to be handed on.
                    await self._reserve(push, slot, at_once=bool(coming))
                except TimeoutError:
                    break
                push.referred.popleft()
                slot.ticket = attachment.expect(slot.offset, slot.size, slot.digest)
                coming.append(slot)
                if runner is not None:
                    runner.expected += 1
            if not coming and push.referred and runner is not None:
                await runner.turn()
                continue
            if not coming:
                if push.committed or push.more is None:
                    return
                push.more.clear()
                # The call's deadline ends this wait if the sender falls silent.
                await push.more.wait()
                continue
            arrived = await _arrived(coming)
            if runner is not None:
                runner.took(len(arrived))
            for slot in arrived:
                self._weigh(push, slot, 0 if attachment.borrowed else len(slot.memory))
            self._take_slots(push, arrived)

    # Whole buckets

    def _take_slots(self, push: IncomingPush, slots: Sequence[Slot]) -> None:
        """Check and decode complete buckets and hand them on; in the pool, spread over its threads."""
        if push.number is not None:
            push.running.append(asyncio.create_task(self._stage(push, slots)))
            return
        if applies_inline(push.shard, [slot.number for slot in slots]):
            self._count_all(push, slots)
            return
        threads = min(len(slots), self._backend.pool_threads, 1 + sum(slot.size for slot in slots) // TURN_BYTES)
        for part in (slots[first::threads] for first in range(threads)):
            counting = self._backend.work_whole(partial(self._count_all, push, part), partial(release_all, part))
            push.running.append(counting)

    def _count_all(self, push: IncomingPush, slots: Sequence[Slot]) -> None:
        """Count complete buckets, and release all their room even on an error."""
        try:
            for slot in slots:
                gradient = opened(slot, self._backend.buffers.take, repeated=push.comparable(slot.number, slot.coding))
                push.decisions[slot.number] = self._count(push, slot.number, gradient, slot.nonfinite)
                slot.release()
        finally:
            release_all(slots)

    async def _stage(self, push: IncomingPush, slots: Sequence[Slot]) -> None:
        def stage() -> None:
            for slot in slots:
                push.staged[slot.number] = opened(slot, self._backend.buffers.take, repeated=False)

        await self._backend.work(stage)

    def _count(self, push: IncomingPush, number: int, gradient: Gradient, nonfinite: Sequence[str]) -> Decision:
        """Count one bucket's contribution, or set its initial values. Runs in the pool."""
        header = push.header
        if header.kind == data_pb2.PUSH_KIND_INIT:
            return push.shard.initialize(number, gradient.values)
        return push.shard.contribute(
            number,
            header.step,
            push.block,
            gradient,
            hyper=push.hyper,
            nonfinite=[*header.nonfinite_tensors, *nonfinite],
            guard=lambda: self._outdated(push),
        )

    def _outdated(self, push: IncomingPush) -> Decision | None:
        """Why an admitted push does not count any more: the timeline changed, or its sender was fenced meanwhile."""
        if push.generation != self._backend.generation:
            return Decision(Outcome.WRONG_TIMELINE, "the server was reconfigured while this push was arriving")
        data = push.header.data
        return self._backend.fenced(data.task, data.incarnation)

    async def _counted(self, push: IncomingPush, commit: data_pb2.Commit) -> PushResult:
        header, shard = push.header, push.shard
        if push.number is not None:
            return await self._commit_whole(push, commit)
        missing = [bucket.number for bucket in shard.buckets if bucket.number not in push.done]
        if header.partial and len(missing) == len(shard.buckets):
            raise ProtocolError(f"shard {shard.number}: the partial push names no bucket")
        if missing and not header.partial:
            await self.abandon(push)
            raise ProtocolError(
                f"shard {shard.number}: the push lacks buckets {missing[:8]}; it must cover every bucket (list those "
                "without a contribution in empty_buckets)"
            )
        if push.running:
            await all_ended(push.running)
        decisions = [push.decisions[number] for number in sorted(push.decisions)]
        worst = worst_of(decisions)
        if not push.gradient and worst.outcome is Outcome.COUNTED:
            await self._backend.work(self._backend.filled)
        return self._result(push, worst, 0)

    async def _commit_whole(self, push: IncomingPush, commit: data_pb2.Commit) -> PushResult:
        header, shard = push.header, push.shard
        if header.base_max > shard.step_max:
            raise ProtocolError(f"base version {header.base_max} is ahead of the shard's version {shard.step_max}")
        scale = commit.scale or 1.0
        if not 0.0 < scale < float("inf"):
            raise ProtocolError(f"scale {commit.scale} of the gradient is not a positive finite number")
        await all_ended(push.running)

        # It continues if this call ends meanwhile, so nothing that it uses may be changed from here.
        staged, push.staged = push.staged, {}

        def apply() -> tuple[Decision, int]:
            return shard.push(
                _push_of(header, scale=scale, skip=commit.skip),
                staged,
                hyper=push.hyper,
                guard=lambda: self._outdated(push),
                then=lambda: self._async_reply(shard),
            )

        def release() -> None:
            staged.clear()
            push.release()

        # Only release() gives the room back: what is being applied still occupies it.
        push.applying = True
        decision, lag = await self._backend.work_whole(apply, release)
        # Everything that the answer reports must be in the standby too, also for a repetition.
        await shard.answerable()
        return self._result(push, decision, lag)

    def _result(self, push: IncomingPush, decision: Decision, lag: int) -> PushResult:
        shard, header = push.shard, push.header
        ack = data_pb2.PushAck()
        ack.outcome, ack.reason, ack.mismatch = outcome_to_proto(decision.outcome), decision.reason, decision.mismatch
        ack.staleness, ack.timeline = lag, self._backend.timeline
        if push.rejected is None:
            ack.step, ack.version = shard.position
            ack.next_seq = shard.consistency.intake.number(shard.mode.last_push(header.data.task) + 1) or 0
            others = [found for found in push.decisions.items() if found[1].outcome is not decision.outcome]
            for number, item in sorted(others, key=lambda found: found[0]):
                ack.buckets.append(
                    data_pb2.BucketAck(bucket=number, outcome=outcome_to_proto(item.outcome), reason=item.reason)
                )
        self._backend.count(push_raw=push.raw_bytes, push_wire=push.wire_bytes)
        return PushResult(
            ack=ack,
            task=header.data.task if push.rejected is None else "",
            shard=header.data.shard,
            codec=header.codec or PLAIN.name,
            lane=lane_name(header.data.lane) or ON_STREAM.lane,
            raw_bytes=push.raw_bytes,
            wire_bytes=push.wire_bytes,
            seconds=time.monotonic() - push.started_s,
        )

    async def abandon(self, push: IncomingPush | None = None) -> None:
        """After the stream's end: let complete buckets finish counting, drop the rest."""
        push = push or self._push
        self._slot = None
        self._push = None
        if push is None:
            return
        try:
            if push.draining is not None:
                push.draining.cancel()
                await asyncio.gather(push.draining, return_exceptions=True)
        finally:
            # Even if the call is cancelled here: a worker that dies ends its stream first, then the call.
            if push.attachment is not None:
                self._attachments.drop(push.attachment, "a push over it ended early")
            push.release()
        if push.running:
            await asyncio.gather(*push.running, return_exceptions=True)
        # A task's error references its frames, and those reference the push.
        push.draining = None
        push.running.clear()


async def _arrived(coming: deque[Slot]) -> list[Slot]:
    """The leading slots that are complete; waits for the first."""
    arrived: list[Slot] = []
    while not arrived:
        while coming and (ticket := coming[0].ticket) is not None and ticket.whole:
            slot = coming.popleft()
            slot.memory, slot.matches = ticket.memory, ticket.matches
            arrived.append(slot)
        if not arrived:
            assert ticket is not None
            await ticket.wait()
    return arrived


def _where(push: IncomingPush, number: int) -> str:
    return f"shard {push.shard.number}, bucket {number}"


def _push_of(header: data_pb2.PushHeader, *, scale: float, skip: bool) -> NumberedPush:
    return NumberedPush(
        task=header.data.task,
        incarnation=header.data.incarnation,
        seq=header.seq,
        base_version=header.base_min,
        clock=header.clock,
        scale=scale,
        skip=skip,
    )
