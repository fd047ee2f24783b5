"""One PushPull: pushes come in, a pull runs beside them, and the replies of both leave through one queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from shardline.consistency.base import Gives
from shardline.core.outcome import Outcome
from shardline.errors import ProtocolError, ShardlineError
from shardline.lanes.attachments import Attachments
from shardline.rpc.errors import drop_frames
from shardline.rpc.v1 import data_pb2
from shardline.server.admission import admit_data, attachment_of
from shardline.server.backend import Backend, HostedShard
from shardline.server.calls import OpenCall
from shardline.server.incoming_push import QUICK_BYTES, PushResult
from shardline.server.pull_sender import AsyncReply, in_push_pull, pull
from shardline.server.push_receiver import PushReceiver

REPLY_QUEUE = 4
"""Messages that a call may have ready before a slow reader blocks it."""
Reply = data_pb2.PushPullReply


class Replies:
    """The replies of one call, in order: messages, then None or the error that ended it.

    An ack and the pull's message behind it are sent as one if both are ready: a small step is one message each way.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Reply | Exception | None] = asyncio.Queue(REPLY_QUEUE)
        self._next: list[Reply | Exception | None] = []
        """Items taken from the queue that were not joined to the previous message."""

    async def put(self, message: Reply) -> None:
        await self._queue.put(message)

    async def put_ack(self, ack: data_pb2.PushAck) -> None:
        await self._queue.put(Reply(ack=ack))

    async def end(self, error: Exception | None) -> None:
        await self._queue.put(error)

    async def get(self) -> Reply | Exception | None:
        item = self._next.pop() if self._next else await self._queue.get()
        if isinstance(item, Reply) and item.HasField("ack") and not self._queue.empty():
            following = self._queue.get_nowait()
            if isinstance(following, Reply) and not following.HasField("ack"):
                following.ack.CopyFrom(item.ack)
                return following
            self._next.append(following)
        return item


@dataclass(eq=False)
class PushPullTalk:
    """Processes the requests of one call; its replies go to `replies`, then None or the error that ended it.

    on_push: called with the result of every push that has ended.
    """

    backend: Backend
    attachments: Attachments
    replies: Replies
    call: OpenCall
    on_push: Callable[[PushResult], None]

    async def run(self, request: AsyncIterator[Any]) -> None:
        """Process all requests, then put the end into the queue."""
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    await self._read(request, group)
            except BaseException as ended:
                # The error and the frame of the task group hold each other, and so the shard, until a collection.
                ended.__traceback__ = None
                raise
        except* Exception as errors:
            error = first_error(errors)
            if isinstance(error, ShardlineError):
                # The call may be cancelled before the error is taken out of the queue.
                drop_frames(error)
            await self.replies.end(error)
            del error
        else:
            await self.replies.end(None)

    async def _read(self, request: AsyncIterator[Any], group: asyncio.TaskGroup) -> None:
        """Process the call's requests; a pull runs beside the pushes."""
        fused: AsyncReply | None = None
        latest: data_pb2.PullRequest | None = None
        pulls = 0

        def copy(shard: HostedShard) -> None:
            if fused is not None:
                fused.copy(shard)

        receiver = PushReceiver(
            self.backend, self.attachments, async_reply=copy, spawn=group.create_task, on_admitted=self.call.of
        )
        try:
            async for message in request:
                push = message.push if message.HasField("push") else None
                if message.HasField("pull"):
                    # Each pull may take a copy of the shard, so a call can't have any number of them.
                    pulls += 1
                    if pulls > 1:
                        raise ProtocolError("PushPull takes one pull; this call has already sent one")
                    self.call.of(message.pull.data.task, message.pull.data.incarnation)
                    if message.pull.WhichOneof("want") != "exact_step" and self._follows_push(message.pull):
                        latest, shard = message.pull, self.backend.shard(message.pull.data.shard)
                        coding = self.backend.coding.pull
                        # Answered from the state right after this call's push, where the mode does not let it wait.
                        attachment = attachment_of(self.attachments, message.pull.data)
                        fused = AsyncReply(message.pull, shard, coding, attachment)
                    elif not is_soon_whole(push):
                        group.create_task(self._pull(message.pull))
                if push is not None:
                    result = await receiver.feed(push)
                    if result is not None:
                        self.on_push(result)
                        if message.HasField("pull") and latest is None and is_soon_whole(push):
                            # Usually a pull of this push's step, so after the push it may be ready at once.
                            group.create_task(self._pull(message.pull))
                        await self.replies.put_ack(result.ack)
                        if fused is not None and latest is not None and fused.copied:
                            shard = self.backend.shard(latest.data.shard)
                            async for message_out in fused.messages(self.backend, shard):
                                await self.replies.put(message_out)
                            fused = latest = None
            if latest is not None:
                await self._pull(latest)
        finally:
            await receiver.abandon()

    def _follows_push(self, request: data_pb2.PullRequest) -> bool:
        """Whether a pull of the latest values has to wait for this call's push."""
        shard = self.backend.shards.get(request.data.shard)
        admitted = admit_data(self.backend, request.data, init=False).outcome is Outcome.SERVED
        return admitted and shard is not None and Gives.COMMON_STEPS not in shard.consistency.gives

    async def _pull(self, request: data_pb2.PullRequest) -> None:
        async for message in pull(self.backend, self.attachments, request, new=in_push_pull):
            await self.replies.put(message)


def first_error(errors: BaseExceptionGroup[Any]) -> Exception:
    """The first plain error of a group of tasks."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return first_error(error)
        if isinstance(error, Exception):
            return error
    return RuntimeError(str(errors))


def is_soon_whole(push: data_pb2.PushFrame | None) -> bool:
    """Whether a frame ends a push that is small enough to answer its pull all at once.

    In larger pushes the first buckets are answered while the last are being counted.
    """
    if push is None or not push.HasField("commit"):
        return False
    return sum(ref.bucket.payload_bytes for ref in push.refs) <= QUICK_BYTES
