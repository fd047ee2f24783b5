"""A primary's standbys on the wire: one stream of records per shard, gone on with or begun anew. PROTOCOL 1.8."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import secrets
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from shardline.core.records import Begin, Head
from shardline.core.timeouts import Timeouts
from shardline.errors import InternalError, ShardlineError, UnreachableError
from shardline.rpc.channel import AioPeer
from shardline.rpc.messages.records import Frame, frames_of
from shardline.rpc.v1 import parameter_server_pb2
from shardline.security import PLAIN, Security
from shardline_ps.shard.bucket import Bucket
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.record_log import RecordLog, copied_image
from shardline_ps.store import ParameterStore

log = logging.getLogger("shardline.ps")
METHOD = "/shardline.rpc.v1.Replication/Replicate"
STREAM_S = 3600.0
"""Deadline of one stream; the next one goes on where it ended."""


class StandbyState(enum.Enum):
    """A standby as its primary sees it; names of proto StandbyState."""

    NONE = 0
    UNPROTECTED = 1
    COPYING = 2
    SYNCED = 3
    SILENT = 4


@dataclass(frozen=True, kw_only=True)
class StandbyView:
    """What a ps tells of one shard's standby."""

    state: StandbyState = StandbyState.NONE
    task: str = ""
    record: int = 0
    silent_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Target:
    """Where a standby is."""

    task: str
    address: str
    appointment: int = 0


class StandbyStream:
    """One shard's stream to its standby. On the server's loop, but for what the log calls."""

    def __init__(
        self,
        store: ParameterStore,
        shard: Shard,
        target: Target,
        *,
        task: str,
        peer: AioPeer,
        timeouts: Timeouts,
    ) -> None:
        self.number = shard.number
        # Weakly: the log knows this stream, and what a stream was cancelled with knows its frames, in cycles. A shard's
        # memory goes with its last user and does not wait for them to be found.
        self._shard = weakref.ref(shard)
        self.target = target
        self._store = store
        self._task = task
        self._timeouts = timeouts
        self._peer = peer
        self._method: Callable[..., Any] = peer.channel.stream_stream(
            METHOD,
            request_serializer=None,
            response_deserializer=parameter_server_pb2.ReplicaReply.FromString,
        )
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._connected = False
        self._problem = ""
        self._whole = False
        """The standby has acknowledged the mark."""
        self._waiting_since_s: float | None = None
        self.log = RecordLog(on_entry=self._entry, run=self._release)
        shard.storage.log = self.log
        self._running = self._loop.create_task(self._run())

    @property
    def shard(self) -> Shard:
        """The shard; raises UnreachableError where this ps has let go of it, and this stream ends."""
        shard = self._shard()
        if shard is None:
            raise UnreachableError(f"shard {self.number} is not held here any more")
        return shard

    def of(self, shard: Shard | None) -> bool:
        """Whether it is this shard's."""
        return shard is not None and self._shard() is shard

    def _entry(self) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._more.set)

    def _release(self, release: Callable[[], None]) -> None:
        # The pool refuses at the end of a process, when nobody asks any more.
        with contextlib.suppress(RuntimeError):
            self._store.pool.submit(_guarded, release, self._store)

    @property
    def view(self) -> StandbyView:
        """How the standby is. From any thread."""
        since_s, marked = self._waiting_since_s, self.log.marked
        silent_s = time.monotonic() - since_s if since_s is not None else 0.0
        state = StandbyState.COPYING if self.log.copy else StandbyState.UNPROTECTED
        if marked and self._whole:
            silent = not self._connected or silent_s > self._timeouts.suspect_s
            state = StandbyState.SILENT if silent else StandbyState.SYNCED
        return StandbyView(
            state=state, task=self.target.task, record=self.log.acked, silent_s=silent_s, problem=self._problem
        )

    # The stream

    async def _run(self) -> None:
        """Keep a stream up. One that breaks before the mark is begun anew, any other is gone on with."""
        told = ""
        while True:
            try:
                await self._stream()
            except* (grpc.aio.AioRpcError, ShardlineError, TimeoutError) as errors:
                self._problem = _sentence(errors)
            except* Exception as errors:
                # A defect; a shard whose standby is never heard again would stand still without a word.
                log.exception("shard %d: the stream to its standby failed", self.number)
                self._problem = _sentence(errors)
            self._connected = False
            self._peer.failed()
            if not self.log.marked:
                # It refuses to be promoted, so nobody has to wait for it.
                self.log.restart(0)
                self._waiting_since_s = None
            if self._problem != told:
                told = self._problem
                log.warning("shard %d: standby at %s: %s; trying again", self.number, self.target.task, told)
            await asyncio.sleep(0.05 + 0.2 * random.random())

    async def _stream(self) -> None:
        call = self._method(metadata=await self._peer.metadata(METHOD), timeout=STREAM_S)
        try:
            await self._send(call, self._head())
            reply = await self._answer(call, self._timeouts.rpc_s)
            copy = 0
            if self.log.resume(reply.copy, reply.record):
                self._whole = reply.synced
            else:
                copy = secrets.randbits(63) | 1
                await self._send(call, Begin(copy))
                # Memory is taken there.
                reply = await self._answer(call, self._timeouts.total_s)
                if reply.copy != copy or reply.synced:
                    raise InternalError(f"{self.target.task} answered for another copy than the one under way")
                # From here on it refuses to be promoted.
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
        # Serialized in the pool: megabytes are copied.
        for message in await self._store.work(lambda: list(frames_of(frame))):
            await self._of(call, call.write(message))

    async def _answer(self, call: Any, timeout_s: float) -> parameter_server_pb2.ReplicaReply:
        """The next reply; raises UnreachableError where the stream ends or the standby has a problem."""
        reply = await self._of(call, asyncio.wait_for(call.read(), timeout_s))
        if reply is grpc.aio.EOF:
            raise UnreachableError(f"the stream of records to {self.target.task} at {self.target.address} ended")
        if reply.problem:
            raise UnreachableError(reply.problem)
        found: parameter_server_pb2.ReplicaReply = reply
        return found

    async def _of(self, call: Any, operation: Awaitable[Any]) -> Any:
        """An operation of the stream; raises UnreachableError where the other side has ended that."""
        try:
            return await operation
        except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
            task = asyncio.current_task()
            # gRPC also cancels whoever reads from a call that was cancelled there; that is not our own end.
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
            # The stream's deadline ends this wait where nothing happens any more.
            await self._more.wait()

    async def _reader(self, call: Any) -> None:
        while True:
            reply = await self._answer(call, STREAM_S)
            self._whole = reply.synced
            self.log.acknowledge(reply.copy, reply.record)
            self._waiting_since_s = time.monotonic() if self.log.waits else None

    # Copying

    async def _copy(self, copy: int) -> None:
        """Copy bucket by bucket while training goes on, then say that all are there."""
        for bucket in self.shard.buckets:
            while not await self._store.work(self._copy_one, copy, bucket):
                # Its step waits for records of others.
                await self.log.passed()
                await asyncio.sleep(0.001)
            await self.log.passed()
        await self._store.work(self._mark, copy)
        log.info("shard %d: copied to its standby at %s", self.number, self.target.task)

    def _copy_one(self, copy: int, bucket: Bucket) -> bool:
        """Send one bucket as it is; False where it has to be tried again."""
        # What is recorded is applied under the same lock, so that the image is of before a record or after it.
        with self.shard.storage.order, bucket.lock:
            if bucket.pending is not None:
                return False
            self.shard.mode.settle(bucket)
            if not self.log.image(copy, bucket.number, copied_image(bucket)):
                raise UnreachableError("the copy was given up")
            return True

    def _mark(self, copy: int) -> None:
        shard = self.shard
        with shard.storage.order:
            pushes, verdict = shard.mode.remembered()
            self.log.mark(copy, pushes=pushes, verdict=verdict)

    # The end

    def go_alone(self) -> None:
        """The chief says so: nothing waits for the standby any more."""
        self._running.cancel()
        shard = self._shard()
        if shard is not None:
            shard.storage.log = None
        self.log.restart(0)

    def abandon(self) -> None:
        """The shard's history ends: what waits never happened."""
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
        """Shards may have been made anew, or be gone: their streams end, and what waits in them never happened."""
        for number, running in list(self._running.items()):
            if not running.of(self._store.shards.get(number)):
                self._running.pop(number).abandon()

    def follow(self) -> None:
        """Do as the placement in force says: begin, go on, or go alone."""
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

    def view(self, number: int) -> StandbyView:
        """How the standby of a shard is. From any thread."""
        running = self._running.get(number)
        return running.view if running is not None else StandbyView()

    async def close(self) -> None:
        """End all streams and channels."""
        while self._running:
            self._running.popitem()[1].abandon()
        for peer in self._peers.values():
            await peer.close()


def _guarded(release: Callable[[], None], store: ParameterStore) -> None:
    """Publish; a defect there must not be lost in the pool."""
    try:
        release()
    except Exception as error:
        log.exception("the thread that publishes steps failed")
        store.on_failure(InternalError(f"the thread that publishes steps failed: {error}"))


def _sentence(errors: BaseExceptionGroup[Any]) -> str:
    """The first error of a group of tasks, as a sentence."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, grpc.aio.AioRpcError):
        return f"{first.code().name.lower()}: {first.details()}"
    return str(first) or type(first).__name__
