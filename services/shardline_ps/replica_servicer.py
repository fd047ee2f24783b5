"""The standby's face: takes the record streams of the shards whose standby this ps holds. PROTOCOL 1.8."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from shardline.errors import ProtocolError, ShardlineError
from shardline.rpc import errors as rpc_errors
from shardline.rpc.records import Begin, Digest, FrameReader, Head
from shardline.rpc.v1 import parameter_server_pb2, parameter_server_pb2_grpc
from shardline.sharding import ShardSpec
from shardline_ps.standby import Standby
from shardline_ps.store import ParameterStore

log = logging.getLogger("shardline.ps")


class Replication(parameter_server_pb2_grpc.ReplicationServicer):
    """Serves Replication over one ParameterStore. One stream per shard: a newer one takes the place of an older one."""

    def __init__(self, task: str, store: ParameterStore) -> None:
        self._task = task
        self._store = store
        self._streams: dict[int, asyncio.Task[Any]] = {}
        self.on_refused: Callable[[str, Exception], None] = lambda method, error: None

    @rpc_errors.stream
    async def Replicate(self, request: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Records of one shard; each is answered when it is applied."""
        handler = asyncio.current_task()
        assert handler is not None
        shard: int | None = None
        try:
            reader: FrameReader | None = None
            standby: Standby | None = None
            async for message in request:
                if reader is None:
                    if not message.HasField("head"):
                        raise ProtocolError("a stream of records starts with its head")
                    spec, problem = self._admit(message.head)
                    if spec is None:
                        yield parameter_server_pb2.ReplicaReply(problem=problem)
                        return
                    shard = message.head.shard
                    self._replace(shard, handler)
                    reader = FrameReader(spec, max_image_bytes=image_limit(spec))
                frame = reader.feed(message)
                if frame is None:
                    continue
                try:
                    standby = await self._take(frame, shard, standby)
                except ShardlineError as error:
                    log.warning("%s: %s", self._task, error)
                    yield parameter_server_pb2.ReplicaReply(problem=str(error))
                    return
                if not isinstance(frame, Digest):
                    yield _reply(standby)
        finally:
            if shard is not None and self._streams.get(shard) is handler:
                del self._streams[shard]

    async def _take(self, frame: Any, shard: int | None, standby: Standby | None) -> Standby | None:
        """Take one frame; returns the standby from then on."""
        assert shard is not None
        if isinstance(frame, Head):
            return self._store.standbys.get(shard)
        if isinstance(frame, Begin):
            # Memory is taken here, so it is tensor work.
            standby = await self._store.work(self._store.standby, shard)
        if standby is None or self._store.standbys.get(shard) is not standby:
            raise ProtocolError(f"{self._task} holds no standby of shard {shard} any more; it has to be copied")
        await self._store.work(standby.take, frame)
        return standby

    def _admit(self, head: parameter_server_pb2.ReplicaHead) -> tuple[ShardSpec | None, str]:
        """The shard's plan, or why this stream is not taken."""
        store, authority = self._store, self._store.authority
        configuration = store.configuration
        if configuration is None or head.job != authority.job or head.plan_id != authority.plan_id:
            return None, f"{self._task} is not configured for this plan of job {head.job!r}"
        if head.timeline != authority.timeline:
            return None, f"{self._task} is at timeline {authority.timeline:#x}, the records are of {head.timeline:#x}"
        place = next((place for place in store.placement if place.shard == head.shard), None)
        if place is None or place.standby_task != self._task or place.task != head.task or head.shard in store.shards:
            return None, f"{self._task} is not to hold a standby of shard {head.shard} for {head.task}"
        return configuration.plan.shards[head.shard], ""

    def _replace(self, shard: int, handler: asyncio.Task[Any]) -> None:
        older = self._streams.get(shard)
        if older is not None and older is not handler:
            older.cancel()
        self._streams[shard] = handler


def _reply(standby: Standby | None) -> parameter_server_pb2.ReplicaReply:
    if standby is None:
        return parameter_server_pb2.ReplicaReply()
    return parameter_server_pb2.ReplicaReply(copy=standby.copy, record=standby.record, synced=standby.synced)


def image_limit(shard: ShardSpec) -> int:
    """What one bucket's image may come to: values and at most a handful of states, each in float64."""
    return 64 * max((bucket.elements for bucket in shard.buckets), default=0) * 8 + (1 << 20)
