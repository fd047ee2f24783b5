"""A primary's standby streams: one stream of records per shard, resumed or restarted as needed. PROTOCOL 1.8."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from shardline.consistency import choices as choices_of
from shardline.core.records import Begin, Head
from shardline.core.timeouts import Timeouts
from shardline.errors import InternalError, ShardlineError, UnreachableError, as_error
from shardline.host.awake import awake_s
from shardline.rpc.channel import AioPeer
from shardline.rpc.messages.records import Frame, frames_of
from shardline.rpc.v1 import parameter_server_pb2 as pb2
from shardline.security import PLAIN, Security
from shardline.storage.bucket import Bucket
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.record_log import RecordLog, copied_image
from shardline_ps.store import ParameterStore

log = logging.getLogger("shardline.ps")
METHOD = "/shardline.rpc.v1.Replication/Replicate"
STREAM_S = 3600.0
"""Deadline of one stream, in seconds; the next one resumes where it ended."""


@dataclass(frozen=True)
class Target:
    task: str
    address: str
    appointment: int = 0


class StandbyStream:
    """One shard's stream to its standby. Runs on the server's loop, except for callbacks of the log."""

    def __init__(
        self, store: ParameterStore, shard: Shard, target: Target, *, task: str, peer: AioPeer, timeouts: Timeouts
    ) -> None:
        self.number = shard.number
        # A weak reference: the log refers to this stream, and a stream's cancellation error to its frames, in cycles. A
        # shard's memory must be freed with its last user, without waiting for the cycle collector.
        self._shard = weakref.ref(shard)
        self.target = target
        self._store = store
        self._task = task
        self._timeouts = timeouts
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._connected = False
        self._problem = ""
        self._whole = False
        """Whether the standby has acknowledged the mark."""
        self._waiting_since_s: float | None = None
        self.log = RecordLog(on_entry=self._entry, run=self._release)
        shard.storage.log = self.log
        self._running = self._loop.create_task(self._run())

    @property
    def shard(self) -> Shard:
        """The shard. Raises UnreachableError if this ps has retired it and the stream is ending."""
        shard = self._shard()
        if shard is None:
            raise UnreachableError(f"shard {self.number} is no longer on this ps")
        return shard

    def of(self, shard: Shard | None) -> bool:
        return shard is not None and self._shard() is shard

    def _entry(self) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = awake_s()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._more.set)

    def _release(self, release: Callable[[], None]) -> None:
        # At process exit the pool refuses work; nobody needs it then.
        with contextlib.suppress(RuntimeError):
            self._store.pool.submit(_guarded, release, self._store)

    @property
    def view(self) -> Mapping[str, Any]:
        """The fields of a ShardStatus message that tell of the standby. Thread-safe."""
        since_s, marked = self._waiting_since_s, self.log.marked
        silent_s = awake_s() - since_s if since_s is not None else 0.0
        state = pb2.STANDBY_STATE_COPYING if self.log.copy else pb2.STANDBY_STATE_UNPROTECTED
        if marked and self._whole:
            silent = not self._connected or silent_s > self._timeouts.suspect_s
            state = pb2.STANDBY_STATE_SILENT if silent else pb2.STANDBY_STATE_SYNCED
        return {
            "standby": state,
            "standby_task": self.target.task,
            "standby_record": self.log.acked,
            "standby_silent_s": silent_s,
            "standby_problem": self._problem,
        }

    # The stream

    async def _run(self) -> None:
        """Keep a stream running. One that breaks before the mark is restarted, any other is resumed."""
        told = ""
        while True:
            try:
                await self._stream()
            except* (grpc.aio.AioRpcError, ShardlineError, TimeoutError) as errors:
                self._problem = _sentence(errors)
            except* Exception as errors:
                # A bug; a shard blocked by a standby that is never heard again must not stay unexplained.
                log.exception("shard %d: the stream to its standby failed", self.number)
                self._problem = _sentence(errors)
            self._connected = False
            self._peer.failed()
            if not self.log.marked:
                # The standby refuses to be promoted, so nothing has to wait for it.
                self.log.restart(0)
                self._waiting_since_s = None
            if self._problem != told:
                told = self._problem
                log.warning("shard %d: standby at %s: %s; trying again", self.number, self.target.task, told)
            await asyncio.sleep(0.05 + 0.2 * random.random())

    async def _stream(self) -> None:
        metadata = await self._peer.metadata(METHOD)
        channel = self._peer.channel
        method: Callable[..., Any] = channel.stream_stream(
            METHOD, request_serializer=None, response_deserializer=pb2.ReplicaReply.FromString
        )
        call = method(metadata=metadata, timeout=STREAM_S)
        try:
            await self._send(call, self._head())
            reply = await self._answer(call, self._timeouts.rpc_s)
            copy = 0
            if self.log.resume(reply.copy, reply.record):
                self._whole = reply.synced
            else:
                copy = secrets.randbits(63) | 1
                await self._send(call, Begin(copy))
                # The standby allocates its memory during this call.
                reply = await self._answer(call, self._timeouts.total_s)
                if reply.copy != copy or reply.synced:
                    raise InternalError(f"{self.target.task} answered for a different copy")
                # From here on the standby refuses to be promoted.
                self._whole = False
                self.log.restart(copy)
            self._connected, self._problem, self._waiting_since_s = True, "", None
            async with asyncio.TaskGroup() as group:
                group.create_task(self._sender(call))
                group.create_task(self._reader(call))
                if copy:
                    group.create_task(self._copy(copy))
        finally:
            call.cancel()

    def _head(self) -> Head:
        authority = self._store.authority
        return Head(
            job=authority.job,
            timeline=authority.timeline,
            plan_id=authority.plan_id,
            shard=self.number,
            task=self._task,
            copy=self.log.copy,
            appointment=self.target.appointment,
        )

    async def _send(self, call: Any, frame: Frame) -> None:
        # Serialized in the pool: this copies megabytes.
        for message in await self._store.work(lambda: list(frames_of(frame))):
            await self._of(call, call.write(message))

    async def _answer(self, call: Any, timeout_s: float) -> pb2.ReplicaReply:
        """The next reply. Raises UnreachableError if the stream ends or the standby reports a problem."""
        reply = await self._of(call, asyncio.wait_for(call.read(), timeout_s))
        if reply is grpc.aio.EOF:
            raise UnreachableError(f"the stream of records to {self.target.task} at {self.target.address} ended")
        if reply.problem:
            raise UnreachableError(reply.problem)
        found: pb2.ReplicaReply = reply
        return found

    async def _of(self, call: Any, operation: Awaitable[Any]) -> Any:
        """Await an operation of the stream. Raises UnreachableError if the other side has ended it."""
        try:
            return await operation
        except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
            task = asyncio.current_task()
            # gRPC also raises CancelledError in readers of a call that the other side has cancelled; that is not our
            # cancellation.
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            code, details = await call.code(), await call.details()
            raise UnreachableError(
                f"the stream to {self.target.address} ended: {code.name.lower()}: {details}"
            ) from None

    async def _sender(self, call: Any) -> None:
        while True:
            self._more.clear()
            while (entry := self.log.take()) is not None:
                await self._send(call, entry.frame)
            # If nothing happens any more, the stream's deadline ends this wait.
            await self._more.wait()

    async def _reader(self, call: Any) -> None:
        while True:
            reply = await self._answer(call, STREAM_S)
            self._whole = reply.synced
            self.log.acknowledge(reply.copy, reply.record)
            self._waiting_since_s = awake_s() if self.log.waits else None

    # Copying

    async def _copy(self, copy: int) -> None:
        """Copy bucket by bucket while training continues, then send the mark."""
        for bucket in self.shard.buckets:
            while not await self._store.work(self._copy_one, copy, bucket):
                # Its step waits for the acknowledgement of a record.
                await self.log.passed()
                await asyncio.sleep(0.001)
            await self.log.passed()
        await self._store.work(self._mark, copy)
        log.info("shard %d: copied to its standby at %s", self.number, self.target.task)

    def _copy_one(self, copy: int, bucket: Bucket) -> bool:
        """Send one bucket's present state; False if it must be tried again."""
        # Records are made under the same locks, so the image precedes or follows a record entirely.
        with self.shard.storage.order:
            self.shard.mode.settle()
            with bucket.lock:
                if bucket.pending is not None:
                    return False
                if not self.log.image(copy, bucket.number, copied_image(bucket)):
                    raise UnreachableError("the copy was abandoned")
                return True

    def _mark(self, copy: int) -> None:
        shard = self.shard
        with shard.storage.order:
            pushes, verdict = shard.mode.remembered()
            choices = choices_of(shard.mode)
            made = choices.made() if choices is not None else None
            self.log.mark(copy, pushes=pushes, verdict=verdict, choices=made)

    # The end

    def go_alone(self) -> None:
        """The chief has ordered it: nothing waits for the standby any more."""
        self._running.cancel()
        shard = self._shard()
        if shard is not None:
            shard.storage.log = None
        self.log.restart(0)

    def abandon(self) -> None:
        """The shard's timeline ends: updates that still wait never happened."""
        self._running.cancel()
        self.log.abandon()


class StandbySender:
    """The standbys of a ps's shards. On the server's loop."""

    def __init__(self, task: str, store: ParameterStore, timeouts: Timeouts, security: Security = PLAIN) -> None:
        self._task = task
        self._store = store
        self._timeouts = timeouts
        self._security = security
        self._peers: dict[str, AioPeer] = {}
        self._running: dict[int, StandbyStream] = {}

    def configured(self) -> None:
        """Shards may have been replaced or retired: end their streams; updates that still wait never happened."""
        for number, running in list(self._running.items()):
            if not running.of(self._store.shards.get(number)):
                self._running.pop(number).abandon()

    def follow(self) -> None:
        """Follow the current placement: start streams, keep them, or let shards continue without a standby."""
        self.configured()
        wanted = {
            place.shard: Target(place.standby_task, place.standby_address, place.appointment)
            for place in self._store.placement
            if place.shard in self._store.shards and place.task == self._task and place.standby_task
        }
        for number in [n for n, running in self._running.items() if wanted.get(n) != running.target]:
            self._running.pop(number).go_alone()
        for number in sorted(wanted.keys() - self._running.keys()):
            shard, target = self._store.shards[number], wanted[number]
            if shard.initialized and shard.buckets:
                self._running[number] = StandbyStream(
                    self._store,
                    shard,
                    target,
                    task=self._task,
                    peer=self._peer(target.address),
                    timeouts=self._timeouts,
                )

    def _peer(self, address: str) -> AioPeer:
        if address not in self._peers:
            self._peers[address] = AioPeer(address, self._timeouts, self._security)
        return self._peers[address]

    def view(self, number: int) -> Mapping[str, Any]:
        """See StandbyStream.view; empty for a shard without a standby."""
        running = self._running.get(number)
        return running.view if running is not None else {}

    async def close(self) -> None:
        while self._running:
            self._running.popitem()[1].abandon()
        for peer in self._peers.values():
            await peer.close()


def _guarded(release: Callable[[], None], store: ParameterStore) -> None:
    """Publish; report an error, which the pool would swallow."""
    try:
        release()
    except Exception as error:
        log.exception("the thread that publishes steps failed")
        store.on_failure(as_error(error) or InternalError(f"the thread that publishes steps failed: {error}"))


def _sentence(errors: BaseExceptionGroup[Any]) -> str:
    """The first error of a task group, as a sentence."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, grpc.aio.AioRpcError):
        return f"{first.code().name.lower()}: {first.details()}"
    return str(first) or type(first).__name__
