"""The state of the optimizer that workers run, on its way to cuts and back: the calls GetState and PutState."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from shardline.core.image import BucketImage
from shardline.core.outcome import Decision, Outcome
from shardline.errors import ProtocolError
from shardline.lanes.attachments import Attachments
from shardline.rpc import errors as rpc_errors
from shardline.rpc.limits import at_most
from shardline.rpc.messages.convert import ImageAssembler, image_parts
from shardline.rpc.v1 import parameter_server_pb2
from shardline.server.admission import admit_data, outcome_to_proto
from shardline.server.calls import OpenCall
from shardline.server.data_plane import DataPlane
from shardline.server.incoming_push import PushResult
from shardline_ps.shard.shard import Shard
from shardline_ps.shard.summing import Summing
from shardline_ps.store import ParameterStore


def _summing(shard: Shard) -> Summing:
    """Raises ProtocolError if the servers run the optimizer: then its state neither leaves them nor comes to them."""
    if shard.summing is None:
        raise ProtocolError(f"shard {shard.number} runs the optimizer of this job itself; workers have no state of it")
    return shard.summing


class StateCalls(DataPlane):
    """The data plane, with these two calls."""

    def __init__(
        self, store: ParameterStore, attachments: Attachments, *, on_push: Callable[[PushResult], None]
    ) -> None:
        super().__init__(store, attachments, on_push=on_push)
        self._store = store

    @rpc_errors.writer
    async def GetState(self, request: parameter_server_pb2.GetStateRequest, context: Any) -> None:
        """Send a worker the state of a step; OVERTAKEN if the shard does not have it."""
        store = self._store
        with self.calls.enter() as call:
            call.of(request.data.task, request.data.incarnation)
            decision, images = admit_data(store, request.data, init=False), None
            if decision.outcome is Outcome.SERVED:
                shard = store.shard(request.data.shard)
                images = await store.work(_summing(shard).state, request.step, request.buckets)
                if images is None:
                    reason = f"shard {shard.number} has no state of step {request.step}: the workers have gone on"
                    decision = Decision(Outcome.OVERTAKEN, reason)
            for image in images or ():
                for header, chunk in image_parts(image):
                    await call.write(context, parameter_server_pb2.GetStateFrame(header=header, chunk=chunk))
            end = parameter_server_pb2.GetStateFrame(
                outcome=outcome_to_proto(decision.outcome),
                reason=decision.reason,
                end=parameter_server_pb2.ImageEnd(buckets=len(images or ())),
            )
            await call.write(context, end)

    @rpc_errors.unary
    async def PutState(self, request: AsyncIterator[Any], context: Any) -> parameter_server_pb2.PutStateReply:
        """Take the state of a step from a worker, for a cut, whole or not at all."""
        with self.calls.enter() as call:
            decision = await self._take_state(request, call)
        return parameter_server_pb2.PutStateReply(outcome=outcome_to_proto(decision.outcome), reason=decision.reason)

    async def _take_state(self, request: AsyncIterator[Any], call: OpenCall) -> Decision:
        shard: Shard | None = None
        assembler: ImageAssembler | None = None
        images: list[BucketImage] = []
        async for frame in request:
            if frame.HasField("data"):
                if shard is not None:
                    raise ProtocolError("PutState has two heads; the shard is unchanged")
                decision = admit_data(self._store, frame.data, init=False)
                if decision.outcome is not Outcome.SERVED:
                    return decision
                call.of(frame.data.task, frame.data.incarnation)
                shard = self._store.shard(frame.data.shard)
                _summing(shard)
                # For images of a shard: values and the rule's states, each at most as large as its largest bucket in
                # float64.
                states = max(1 if bucket.rule is None else 1 + len(bucket.rule.states) for bucket in shard.buckets)
                assembler = ImageAssembler(max_bytes=states * max(bucket.spec.elements for bucket in shard.buckets) * 8)
            if shard is None or assembler is None:
                raise ProtocolError("PutState must start with its head")
            if (image := assembler.read(frame)) is not None:
                at_most(len(images) + 1, len(shard.buckets), f"PutState of shard {shard.number}: buckets")
                images.append(image)
            if frame.HasField("end"):
                if not assembler.idle:
                    break
                return await self._store.work(_summing(shard).bring, images)
        raise ProtocolError("PutState ended early; the shard is unchanged")
