"""Small steps are answered where they are read: on the loop, without a task, a queue or a wake-up in between.

A call that is a single request, with a push that the loop counts and a pull that this push completes, needs nothing of
what PushPullTalk keeps for long streams. The same coroutines run; usually they have nothing to wait for.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, NoReturn, TypeVar

from shardline.lanes.attachments import Attachments
from shardline.lanes.call_server import Answered, ReplyWriter
from shardline.server.admission import attachment_of
from shardline.server.backend import Backend
from shardline.server.calls import OpenCalls
from shardline.server.incoming_push import PushResult, gradient_kind
from shardline.server.inline_apply import applies_inline
from shardline.server.pull_sender import SHARED_CALL, pull, ready_reply
from shardline.server.push_receiver import PushReceiver
from shardline.wire.protobuf import PushFrameView, ReplyView, RequestView, write_reply

T = TypeVar("T")


class Started(Generic[T]):
    """A coroutine that has run up to its first wait, without a task. On the loop.

    ended: it had nothing to wait for; `result` is what it returned. Raises what the coroutine raises.
    """

    result: T

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._awaited: Any = None
        self.ended = False
        try:
            self._awaited = coroutine.send(None)
        except StopIteration as end:
            self.ended, self.result = True, end.value

    @types.coroutine
    def rest(self) -> Generator[Any, Any, T]:
        """The rest of it, for a task."""
        while not self.ended:
            try:
                try:
                    sent = yield self._awaited
                except BaseException as error:
                    self._awaited = self._coroutine.throw(error)
                else:
                    self._awaited = self._coroutine.send(sent)
            except StopIteration as end:
                self.ended, self.result = True, end.value
        return self.result


class SmallSteps:
    """Answers calls that are one small push, and the pull of the step that it completes. Used on the server's loop.

    on_push: called with the result of every push that has ended.
    """

    def __init__(
        self,
        backend: Backend,
        attachments: Attachments,
        calls: OpenCalls,
        on_push: Callable[[PushResult], None],
    ) -> None:
        self._backend = backend
        self._attachments = attachments
        self._calls = calls
        self._on_push = on_push

    def answer(self, request: RequestView) -> Answered | None:
        """The replies so far, and what is left to do; None if this request is not a small step: nothing was done.

        Raises the error that ends the call.
        """
        frame = request.push
        if request.error is not None or frame is None or not self._is_small(frame):
            return None
        receiver = PushReceiver(self._backend, self._attachments, spawn=_never)
        try:
            push = Started(receiver.feed(frame))
            if not push.ended:
                return Answered([], self._rest(request, receiver, push))
        except BaseException:
            Started(receiver.abandon())
            raise
        assert push.result is not None, "a frame with a commit ends its push"
        ack = self._counted(push.result)
        if request.pull is None:
            return Answered([ack], None)
        served = ready_reply(self._backend, self._attachments, request.pull, outer=SHARED_CALL)
        if served is None:
            return Answered([ack], self._rest(request, receiver, None))
        # Fields of one message may be in any order.
        return Answered([served + ack], None)

    def _is_small(self, frame: PushFrameView) -> bool:
        """Whether a frame is a whole push of gradients in place that the loop counts."""
        header, commit = frame.header, frame.commit
        if header is None or commit is None or not frame.refs or frame.chunk is not None or frame.bucket is not None:
            return False
        shard = self._backend.shards.get(header.data.shard)
        if shard is None or shard.consistency.whole_pushes or not gradient_kind(header):
            return False
        if header.empty_buckets or commit.empty_buckets:
            return False
        numbers = [ref.bucket.bucket for ref in frame.refs]
        if max(numbers) >= len(shard.buckets) or not applies_inline(shard, numbers):
            return False
        attachment = attachment_of(self._attachments, header.data)
        return attachment is not None and attachment.borrowed

    def _counted(self, result: PushResult) -> bytes:
        self._on_push(result)
        return write_reply(ReplyView(ack=result.ack))

    def _rest(
        self, request: RequestView, receiver: PushReceiver, push: Started[PushResult | None] | None
    ) -> Callable[[ReplyWriter], Awaitable[None]]:
        """What is left of a step: counting the push, if it waits, and the pull."""

        async def rest(writer: ReplyWriter) -> None:
            with self._calls.enter() as call:
                for part in (request.push.header if request.push is not None else None, request.pull):
                    if part is not None:
                        call.of(part.data.task, part.data.incarnation)
                if push is not None:
                    try:
                        result = await push.rest()
                    finally:
                        await receiver.abandon()
                    assert result is not None, "a frame with a commit ends its push"
                    await call.write(writer, self._counted(result))
                if request.pull is not None:
                    async for message in pull(self._backend, self._attachments, request.pull, outer=SHARED_CALL):
                        await call.write(writer, message)

        return rest


def _never(coroutine: Coroutine[Any, Any, None]) -> NoReturn:
    raise AssertionError("a push that is one frame is received by its own call")
