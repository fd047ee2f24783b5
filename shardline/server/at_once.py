"""Steps in one request are answered where they are read: on the loop, without tasks and queues in between.

A call that is a single request, with a push whose gradients stay in place or are small and the pull that follows, needs
nothing of what PushPullTalk keeps for long streams. The same coroutines run. In a small step they have nothing to wait
for; in others one task waits until all buckets are counted, and answers with all of them in one message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from shardline.core.outcome import Outcome
from shardline.host.loops import Started
from shardline.lanes.attachments import Attachment, Attachments
from shardline.lanes.call_server import Answered, ReplyWriter
from shardline.rpc.v1 import data_pb2
from shardline.server.admission import admit_data, attachment_of
from shardline.server.backend import Backend
from shardline.server.calls import OpenCalls
from shardline.server.conversation import is_soon_whole
from shardline.server.incoming_push import PushResult, gradient_kind
from shardline.server.pull_sender import STATES_PER_FRAME, in_push_pull, pull, ready_reply
from shardline.server.push_receiver import NoRoomError, PushReceiver

Counted: TypeAlias = tuple[PushResult, data_pb2.PullRequest | None]
"""The result of a push, and the pull that follows it."""


@dataclass(eq=False)
class SingleRequests:
    """Answers calls that are one push, in place or small, and the pull that follows. Used on the server's loop.

    on_push: called with the result of every push that has ended.
    """

    backend: Backend
    attachments: Attachments
    calls: OpenCalls
    on_push: Callable[[PushResult], None]

    def answer(self, request: data_pb2.PushPullRequest) -> Answered | None:
        """The replies so far, and what is left to do. None if this is no such request: nothing was done.

        Raises the error that ends the call.
        """
        frame = request.push
        attachment = self._fits(frame)
        if attachment is None:
            return None
        receiver = PushReceiver(self.backend, self.attachments, spawn=_never)
        try:
            push = Started(_counted(receiver, frame, request.pull if request.HasField("pull") else None))
        except BaseException:
            Started(receiver.abandon())
            raise
        if not push.ended:
            return Answered([], self._rest(request, receiver, push))
        result, wanted = push.result
        # Usually both have the same head, and nothing else has happened since the push was admitted.
        together = bool(result.task) and wanted is not None and wanted.data == frame.header.data
        reply, waits = self._replied(result, wanted, attachment if together else None)
        return Answered([reply], self._rest(request, receiver, push) if waits else None)

    def _fits(self, frame: data_pb2.PushFrame) -> Attachment | None:
        """The attachment of a frame that is a whole push of gradients, in place or small: one message answers it."""
        header, commit = frame.header, frame.commit
        if not frame.HasField("header") or not frame.HasField("commit"):
            return None
        if frame.HasField("chunk") or frame.HasField("bucket"):
            return None
        shard = self.backend.shards.get(header.data.shard)
        if shard is None or not gradient_kind(header) or shard.consistency.intake.number(header.seq) is not None:
            return None
        if header.empty_buckets or not (frame.refs or commit.empty_buckets):
            return None
        attachment = attachment_of(self.attachments, header.data)
        if attachment is None:
            return None
        # With more, the first should be answered while the last are counted.
        fits = len(frame.refs) <= STATES_PER_FRAME if attachment.borrowed else is_soon_whole(frame)
        return attachment if fits else None

    def _replied(
        self, result: PushResult, wanted: data_pb2.PullRequest | None, admitted: Attachment | None
    ) -> tuple[data_pb2.PushPullReply, bool]:
        """A message with the ack of a push, and with the answer of its pull if it is ready; whether the pull waits.

        admitted: the attachment of a pull that needs no further look at its sender.
        """
        self.on_push(result)
        reply = data_pb2.PushPullReply()
        reply.ack.CopyFrom(result.ack)
        if wanted is None:
            return reply, False
        if admitted is None and admit_data(self.backend, wanted.data, init=False).outcome is Outcome.SERVED:
            admitted = attachment_of(self.attachments, wanted.data)
        ready = admitted is not None and ready_reply(self.backend, admitted, wanted, reply)
        return reply, not ready

    def _rest(
        self, request: data_pb2.PushPullRequest, receiver: PushReceiver, push: Started[Counted]
    ) -> Callable[[ReplyWriter], Awaitable[None]]:
        """What is left of a step: counting the push, if it waits, and the pull."""

        async def rest(writer: ReplyWriter) -> None:
            with self.calls.enter() as call:
                for part in (request.push.header, request.pull):
                    if part.HasField("data"):
                        call.of(part.data.task, part.data.incarnation)
                wanted = request.pull if request.HasField("pull") else None
                if not push.ended:
                    try:
                        result, wanted = await push.rest()
                    finally:
                        await receiver.abandon()
                    reply, waits = self._replied(result, wanted, None)
                    await call.write(writer, reply)
                    if not waits:
                        return
                assert wanted is not None
                async for message in pull(self.backend, self.attachments, wanted, new=in_push_pull):
                    await call.write(writer, message)

        return rest


async def _counted(receiver: PushReceiver, frame: data_pb2.PushFrame, wanted: data_pb2.PullRequest | None) -> Counted:
    """Count a push that is one frame. If it finds no room, its answer ends the call, as for any push."""
    try:
        result = await receiver.feed(frame)
    except NoRoomError as no_room:
        await receiver.abandon()
        return no_room.result, None
    assert result is not None, "a frame with a commit ends its push"
    return result, wanted


def _never(coroutine: Coroutine[Any, Any, None]) -> NoReturn:
    raise AssertionError("a push that is one frame is received by its own call")
