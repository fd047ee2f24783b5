"""The standby's gRPC service: takes the record streams of the shards whose standby this ps holds. PROTOCOL 1.8."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from shardline.core.plan import ShardSpec
from shardline.core.records import Begin, Digest, Head
from shardline.errors import ProtocolError, ShardlineError, UnreachableError
from shardline.rpc import errors as rpc_errors
from shardline.rpc.messages.records import FrameReader
from shardline.rpc.v1 import parameter_server_pb2, parameter_server_pb2_grpc
from shardline_ps.standby.standby import Standby
from shardline_ps.store import ParameterStore

log = logging.getLogger("shardline.ps")


class StandbyServicer(parameter_server_pb2_grpc.ReplicationServicer):
    """Serves Replication for one ParameterStore. One stream per shard: a new one replaces the old one."""

    def __init__(self, task: str, store: ParameterStore) -> None:
        self._task = task
        self._store = store
        self._streams: dict[int, _Stream] = {}
        self.on_refused: Callable[[str, Exception], None] = lambda method, error: None

    def end(self, shard: int, reason: str) -> None:
        """End a shard's stream, if there is one: its primary will reconnect."""
        stream = self._streams.pop(shard, None)
        if stream is not None:
            stream.reason = reason
            stream.handler.cancel()

    def keep_only(self, shards: Collection[int], reason: str) -> None:
        """End the streams of all other shards: an open stream keeps its standby alive."""
        for shard in self._streams.keys() - set(shards):
            self.end(shard, reason)

    # Writes instead of yielding, so that a replaced stream gets its reason, whatever its handler is waiting for.

    @rpc_errors.writer
    async def Replicate(self, request: AsyncIterator[Any], context: Any) -> None:
        """Records of one shard; each is acknowledged once it is applied."""
        stream: _Stream | None = None
        shard: int | None = None
        try:
            reader: FrameReader | None = None
            standby: Standby | None = None
            appointment = 0
            async for message in request:
                if reader is None:
                    if not message.HasField("head"):
                        raise ProtocolError("a stream of records must start with its head")
                    spec, problem = self._admit(message.head)
                    if spec is None:
                        await context.write(parameter_server_pb2.ReplicaReply(problem=problem))
                        return
                    shard, appointment = message.head.shard, message.head.appointment
                    self.end(shard, "a newer stream has replaced this one")
                    stream = self._streams[shard] = _Stream()
                    reader = FrameReader(spec)
                frame = reader.feed(message)
                if frame is None:
                    continue
                try:
                    standby = await self._take(frame, shard, standby, appointment)
                except ShardlineError as error:
                    log.warning("%s: %s", self._task, error)
                    await context.write(parameter_server_pb2.ReplicaReply(problem=str(error)))
                    return
                if not isinstance(frame, Digest):
                    await context.write(await self._reply(standby))
        except asyncio.CancelledError:
            # If its own handler is cancelled, it sends the other side nothing.
            if stream is None or not stream.reason:
                raise
            stream.handler.uncancel()
            raise UnreachableError(stream.reason) from None
        finally:
            if shard is not None and self._streams.get(shard) is stream:
                del self._streams[shard]

    async def _take(self, frame: Any, shard: int | None, standby: Standby | None, appointment: int) -> Standby | None:
        """Take one frame; returns the standby to use from then on."""
        assert shard is not None
        if isinstance(frame, Head):
            return self._store.standbys.get(shard)
        if isinstance(frame, Begin):
            # Allocates memory, so it runs in the pool like tensor work.
            standby = await self._store.work(self._store.standby, shard)
        if standby is None or self._store.standbys.get(shard) is not standby:
            raise ProtocolError(f"{self._task} no longer has a standby of shard {shard}; it must be copied again")
        await self._store.work(lambda: standby.take(frame, appointment=appointment))
        return standby

    async def _reply(self, standby: Standby | None) -> parameter_server_pb2.ReplicaReply:
        if standby is None:
            return parameter_server_pb2.ReplicaReply()
        # A frame of an earlier stream may still be being applied.
        copy, record, synced = await self._store.work(standby.standing)
        return parameter_server_pb2.ReplicaReply(copy=copy, record=record, synced=synced)

    def _admit(self, head: parameter_server_pb2.ReplicaHead) -> tuple[ShardSpec | None, str]:
        """The shard's plan, or the reason for refusing this stream."""
        store, authority = self._store, self._store.authority
        configuration = store.configuration
        if (
            configuration is None
            or not authority.configured
            or head.job != authority.job
            or head.plan_id != authority.plan_id
        ):
            return None, f"{self._task} is not configured for this plan of job {head.job!r}"
        if head.timeline != authority.timeline:
            return None, f"{self._task} is at timeline {authority.timeline:#x}; the records are for {head.timeline:#x}"
        place = next((place for place in store.placement if place.shard == head.shard), None)
        if place is None or place.standby_task != self._task or place.task != head.task or head.shard in store.shards:
            return None, f"{self._task} is not to hold a standby of shard {head.shard} for {head.task}"
        if place.appointment != head.appointment:
            return None, (
                f"{self._task} has appointment {place.appointment:#x} for the standby of shard {head.shard}; the "
                f"records are for {head.appointment:#x}"
            )
        return configuration.plan.shards[head.shard], ""


class _Stream:
    """One call while its handler runs; created by the handler."""

    def __init__(self) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self.handler = handler
        self.reason = ""
        """Why this side ended it; empty if it did not."""
