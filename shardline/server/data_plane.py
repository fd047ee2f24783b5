"""The gRPC interface of the data plane: open a lane, push, pull, progress. Decisions are made elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from shardline.core.outcome import Outcome
from shardline.errors import ProtocolError
from shardline.lanes.attachments import Attachments, Hosted
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_server import Answered, ReplyWriter
from shardline.rpc import errors as rpc_errors
from shardline.rpc.messages.data import lane_name
from shardline.rpc.messages.fields import to_message
from shardline.rpc.v1 import common_pb2, data_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from shardline.server.admission import admit_data, holder_of, outcome_to_proto
from shardline.server.at_once import SingleRequests
from shardline.server.backend import Backend
from shardline.server.calls import OpenCalls
from shardline.server.conversation import PushPullTalk, Replies
from shardline.server.incoming_push import PushResult
from shardline.server.pull_sender import in_pull, pull
from shardline.server.push_receiver import NoRoomError, PushReceiver


class DataPlane(parameter_server_pb2_grpc.ParameterServerServicer):
    """Serves the workers' calls over one backend; the service's other calls are not implemented.

    attachments: lanes that workers may open. on_push: called on the loop with the result of every push that has ended.
    """

    def __init__(
        self, backend: Backend, attachments: Attachments, *, on_push: Callable[[PushResult], None] = lambda result: None
    ) -> None:
        self._backend = backend
        self._attachments = attachments
        self._on_push = on_push
        self.calls = OpenCalls()
        self._single = SingleRequests(backend, attachments, self.calls, on_push)

    @rpc_errors.unary
    async def OpenLane(
        self, request: parameter_server_pb2.OpenLaneRequest, context: Any
    ) -> parameter_server_pb2.OpenLaneReply:
        """Prepare an attachment for an admitted worker."""
        data = request.data
        decision = admit_data(self._backend, data, init=True)
        if decision.outcome is not Outcome.SERVED:
            reason = decision.reason
            if decision.outcome is Outcome.REFUSED:
                # The lane is not the reason, so another one would not help.
                reason = f"shard {data.shard} accepts nothing from {data.task}: {reason}"
            return parameter_server_pb2.OpenLaneReply(outcome=outcome_to_proto(decision.outcome), reason=reason)
        lane = lane_name(data.lane) or f"number {data.lane}"
        try:
            holder, shard = holder_of(data, beside=request.beside), hosted(self._backend, data.shard)
            number, opening = self._attachments.open(lane, holder, shard, asyncio.get_running_loop(), self)
        except LaneUnavailable as error:
            return parameter_server_pb2.OpenLaneReply(
                outcome=common_pb2.OUTCOME_REFUSED, reason=f"it can't open a {lane} lane: {error}"
            )
        return to_message(
            parameter_server_pb2.OpenLaneReply, opening, outcome=common_pb2.OUTCOME_SERVED, attachment=number
        )

    @rpc_errors.unary
    async def Push(self, request: AsyncIterator[Any], context: Any) -> data_pb2.PushReply:
        """One contribution; acknowledged when all its buckets are counted or staged."""
        result: PushResult | None = None
        with self.calls.enter() as call:
            receiver = PushReceiver(self._backend, self._attachments, spawn=asyncio.create_task, on_admitted=call.of)
            try:
                async for message in request:
                    if result is not None:
                        raise ProtocolError("Push takes one push; use PushPull for several")
                    result = await receiver.feed(message.frame)
            except NoRoomError as no_room:
                result = no_room.result
            finally:
                await receiver.abandon()
        if result is None:
            raise ProtocolError("the push ended without a commit; only acknowledged buckets count")
        self._on_push(result)
        return data_pb2.PushReply(ack=result.ack)

    @rpc_errors.writer
    async def Pull(self, request: data_pb2.PullRequest, context: Any) -> None:
        """Buckets as they become ready."""
        with self.calls.enter() as call:
            # A call that is not admitted ends by itself.
            call.of(request.data.task, request.data.incarnation)
            answer: Any = pull(self._backend, self._attachments, request, new=in_pull)
            async with contextlib.aclosing(answer) as messages:
                async for message in messages:
                    await call.write(context, message)

    @rpc_errors.writer
    async def PushPull(self, request: AsyncIterator[Any], context: Any) -> None:
        await self._push_pull(request, context)

    async def answer(self, request: AsyncIterator[Any], writer: ReplyWriter) -> None:
        """The same for a call over the socket of a lane. Raises the error that ends the call."""
        try:
            await self._push_pull(request, writer)
        except Exception as error:
            rpc_errors.count_refusal(self, "PushPull", error)
            raise

    def answer_at_once(self, request: data_pb2.PushPullRequest) -> Answered | None:
        """The same for a step in one request, as far as it need not wait; None = it is none. Raises like answer()."""
        try:
            return self._single.answer(request)
        except Exception as error:
            rpc_errors.count_refusal(self, "PushPull", error)
            raise

    async def _push_pull(self, request: AsyncIterator[Any], context: Any) -> None:
        with self.calls.enter() as call:
            replies = Replies()
            talk = PushPullTalk(self._backend, self._attachments, replies, call, self._on_push)
            task = asyncio.create_task(talk.run(request))
            try:
                while (reply := await replies.get()) is not None:
                    if isinstance(reply, NoRoomError):
                        # Like any push that does not count, it ends the call.
                        self._on_push(reply.result)
                        await call.write(context, data_pb2.PushPullReply(ack=reply.result.ack))
                        return
                    if isinstance(reply, Exception):
                        raise reply
                    await call.write(context, reply)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    @rpc_errors.unary
    async def Progress(self, request: data_pb2.ProgressRequest, context: Any) -> data_pb2.ProgressReply:
        """The shard's progress for some replicas."""
        backend = self._backend
        decision = admit_data(backend, request.data, init=False)
        reply = data_pb2.ProgressReply(
            outcome=outcome_to_proto(decision.outcome), reason=decision.reason, timeline=backend.timeline
        )
        if decision.outcome is not Outcome.SERVED:
            return reply
        shard = backend.shard(request.data.shard)
        await shard.answerable()
        known = shard.replicas
        if len(request.replicas) > known or any(replica >= known for replica in request.replicas):
            raise ProtocolError(f"Progress asks for replicas {list(request.replicas)[:8]}; the job has {known}")
        task, incarnation = request.data.task, request.data.incarnation
        steps = await backend.work(shard.mode.standing, task, incarnation, tuple(request.replicas))
        reply.replicas.extend(data_pb2.ReplicaProgress(replica=replica, step=step) for replica, step in steps.items())
        reply.step_min, reply.step_max, reply.version = shard.step_min, shard.step_max, shard.version
        reply.last_seq = shard.mode.last_push(task, incarnation)
        reply.wants_state = shard.summing is not None and shard.summing.wants_state()
        return reply


def hosted(backend: Backend, number: int) -> Hosted:
    shard = backend.shard(number)
    return Hosted(
        shard=number,
        publication=shard.publication,
        by_reference=shard.lends and backend.coding.pull.is_view,
        exact=backend.coding.push.is_view and backend.coding.pull.is_view,
        pushes=shard.replicas,
    )
