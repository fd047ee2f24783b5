"""The chief's gRPC service: parse, ask the control thread, answer. Decisions are made elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

import grpc
import torch

from shardline.checkpoint import Checkpoint, CheckpointStore
from shardline.cluster import MAX_TASKS, format_address, parse_address
from shardline.core.identity import Identity
from shardline.core.orders import StepReport
from shardline.core.tensor_bytes import tensor_bytes, tensor_from_bytes
from shardline.core.timeouts import Timeouts
from shardline.errors import (
    CheckpointError,
    ForbiddenError,
    JobError,
    ProtocolError,
    ShardlineError,
    UnreachableError,
    UsageError,
)
from shardline.rpc import errors as rpc_errors
from shardline.rpc.auth.access import Access
from shardline.rpc.auth.rights import joining_refusal
from shardline.rpc.limits import (
    IMAGE_CHUNK_BYTES,
    MAX_CUTS,
    MAX_FIGURES,
    MAX_LEASES,
    MAX_MEMBERS,
    MAX_REPLICAS,
    MAX_SENTENCE,
    MAX_TENSORS,
    at_most,
    short,
)
from shardline.rpc.messages.convert import DTYPE_TO_PROTO
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.messages.status import PHASES, chief_status_to_proto, ps_status_from_proto
from shardline.rpc.report_queue import MAX_LOGGED, MAX_LOGGED_NAME, MAX_PASSES
from shardline.rpc.v1 import chief_pb2, chief_pb2_grpc, common_pb2, places_pb2, places_pb2_grpc
from shardline_chief.io.control import Control
from shardline_chief.io.streams import StreamChannel
from shardline_chief.io.targets import own_metrics, tell_left_out
from shardline_chief.rules.messages import Beat, Join

log = logging.getLogger("shardline_chief.io.servicer")

SERVICES = ("shardline.rpc.v1.Chief",)
JOIN = "/shardline.rpc.v1.Chief/Join"
MEASURED = ("data_s", "compute_s", "exchange_s", "blocked_s", "drift", "gap")
MAX_NAME = 256
SECRET_BYTES = 32
MOST_FETCHES = 16
"""Checkpoints that are sent at a time: each keeps one on disk and a tensor of it in memory."""
FETCH_TIMES = 10
"""How many --timeouts the sending of one may take."""
MAX_LOADERS = 16
"""Highest number of a worker's loader."""
MAX_STEPS = 4096
"""Most step reports in one heartbeat."""


class ChiefServicer(chief_pb2_grpc.ChiefServicer):
    """Serves Chief for one Control."""

    def __init__(
        self,
        control: Control,
        store: CheckpointStore,
        access: Access,
        *,
        term: int,
        timeouts: Timeouts,
        hosts: Collection[str] = (),
    ) -> None:
        """hosts: those in the cluster spec."""
        self._control = control
        self._hosts = hosts
        self._timeouts = timeouts
        self.sending = 0
        """Checkpoints that are being sent."""
        self._with_rows: Checkpoint | None = None
        """The checkpoint whose tables' rows were asked for last: its files stay readable when it is deleted."""
        self._access = access
        self._store = store
        self._term = term

    # Membership

    @rpc_errors.unary
    async def Join(self, request: chief_pb2.JoinRequest, context: Any) -> chief_pb2.JoinReply:
        """Admit a task, or say why not."""
        join = join_from_proto(request)
        refusal = joining_refusal(join.role, self._access.caller(JOIN, context))
        if refusal:
            raise ForbiddenError(f"{join.name} at {join.address or 'an unnamed address'} is not admitted: {refusal}")
        secret, told = secrets.token_bytes(SECRET_BYTES), join.metrics_address
        metrics = await own_metrics(told, join.address, context.peer(), self._hosts) if told else ""
        join = dataclasses.replace(join, secret=secret, metrics_address=metrics)
        answer = await asyncio.wrap_future(self._control.join(join))
        if answer.accepted and told and not metrics:
            tell_left_out(answer.task, context.peer(), told)
        return to_message(chief_pb2.JoinReply, answer, term=self._term)

    @rpc_errors.stream
    async def Heartbeat(self, request: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Takes heartbeats and yields orders: whenever they change, and in answer to each heartbeat."""
        channel = StreamChannel(asyncio.get_running_loop())
        life: list[tuple[str, int]] = []
        reader = asyncio.create_task(self._read(request, channel, life))
        try:
            while (orders := await channel.queue.get()) is not None:
                if isinstance(orders, ShardlineError):
                    raise orders
                scores = [chief_pb2.FollowedScore(step=step, value=value) for step, value in orders.scores]
                yield to_message(chief_pb2.Orders, orders, phase=PHASES[orders.phase.name.lower()], scores=scores)
            if reader.done() and not reader.cancelled() and reader.exception() is not None:
                raise reader.exception() or ProtocolError("heartbeat failed")
        finally:
            reader.cancel()
            for task, incarnation in life:
                self._control.stream_ended(task, incarnation, channel)

    async def _read(self, request: AsyncIterator[Any], channel: StreamChannel, life: list[tuple[str, int]]) -> None:
        try:
            async for message in request:
                beat = beat_from_proto(message)
                if not life:
                    life.append((beat.task, beat.incarnation))
                elif life[0] != (beat.task, beat.incarnation):
                    raise ProtocolError(f"a heartbeat of {beat.task} arrived on the stream of {life[0][0]}")
                # One at a time: what a task sends faster than it is taken in waits at its sender.
                await asyncio.wrap_future(self._control.beat(beat, channel))
        finally:
            channel.queue.put_nowait(None)

    # The job

    @rpc_errors.unary
    async def GetJob(self, request: chief_pb2.GetJobRequest, context: Any) -> chief_pb2.GetJobReply:
        """Job, plan and placement."""
        _life(request, "GetJob")
        return to_message(chief_pb2.GetJobReply, await self._ask(lambda now_s: self._control.program.job_view()))

    @rpc_errors.unary
    async def Lease(self, request: chief_pb2.LeaseRequest, context: Any) -> chief_pb2.LeaseReply:
        """Asynchronous mode: the next batches."""
        _life(request, "Lease")
        at_most(len(request.done), MAX_LEASES, f"Lease: finished leases of {request.task}")
        done = tuple(request.done)
        answer = await self._ask_noted(
            Identity(request.task, request.incarnation, request.secret),
            lambda now_s: self._control.program.lease(request.task, request.incarnation, done, now_s),
        )
        outcome = common_pb2.Outcome.Value(f"OUTCOME_{answer.outcome}")
        return to_message(chief_pb2.LeaseReply, answer, outcome=outcome)

    @rpc_errors.unary
    async def Report(self, request: chief_pb2.ReportRequest, context: Any) -> chief_pb2.ReportReply:
        """Score of a checkpoint."""
        _life(request, "Report")
        at_most(len(request.metrics), MAX_FIGURES, f"Report: metrics of {request.task}")
        at_most(len(request.metric_order), MAX_FIGURES, f"Report: names of metrics of {request.task}")
        for name in request.metrics:
            short(name, f"Report: name of a metric of {request.task}")
        short(request.failure, f"Report: failure of {request.task}", MAX_SENTENCE)
        order = [*request.metric_order, *sorted(request.metrics)]
        metrics = {name: request.metrics[name] for name in dict.fromkeys(order) if name in request.metrics}
        best = await self._ask_noted(
            Identity(request.task, request.incarnation, request.secret),
            lambda now_s: self._control.program.report(
                request.task, request.incarnation, request.step, metrics, request.failure, now_s
            ),
        )
        return chief_pb2.ReportReply(best=best)

    @rpc_errors.unary
    async def Status(self, request: chief_pb2.ChiefStatusRequest, context: Any) -> chief_pb2.ChiefStatusReply:
        """The current status of the job."""
        return chief_status_to_proto(await asyncio.wrap_future(self._control.status()))

    @rpc_errors.unary
    async def Stop(self, request: chief_pb2.StopJobRequest, context: Any) -> chief_pb2.StopJobReply:
        """End the job with a checkpoint."""
        short(request.reason, "Stop: reason", MAX_SENTENCE)
        step = await asyncio.wrap_future(self._control.request_stop(request.reason or "requested by a client"))
        return chief_pb2.StopJobReply(stop_step=step)

    @rpc_errors.unary
    async def Move(self, request: chief_pb2.MoveRequest, context: Any) -> chief_pb2.MoveReply:
        """Move shards to other servers while the job trains."""
        short(request.drain, "Move: drain")
        try:
            answer = await self._ask(
                lambda now_s: self._control.program.move(request.drain, int(request.number), now_s)
            )
        except (UsageError, JobError) as error:
            return chief_pb2.MoveReply(failure=str(error))
        return to_message(chief_pb2.MoveReply, answer)

    @rpc_errors.unary
    async def Loader(self, request: chief_pb2.LoaderRequest, context: Any) -> chief_pb2.LoaderReply:
        """Keep the state of a script's loader for the checkpoint of its step, or find it."""
        _life(request, "Loader")
        at_most(request.number, MAX_LOADERS, f"Loader: number of a loader of {request.task}")
        await self._ask_noted(Identity(request.task, request.incarnation, request.secret), lambda now_s: None)
        loader, step = f"{request.task}-{request.number}", int(request.step)
        if request.state:
            await asyncio.to_thread(self._store.loaders.keep, loader, step, request.state)
            return chief_pb2.LoaderReply()
        return chief_pb2.LoaderReply(state=await asyncio.to_thread(self._store.loader_state, loader, step))

    async def _ask(self, question: Callable[[float], Any]) -> Any:
        return await asyncio.wrap_future(self._control.call(question))

    async def _ask_noted(self, who: Identity, question: Callable[[float], Any]) -> Any:
        return await asyncio.wrap_future(self._control.call_noted(who, question))

    # Checkpoints

    @rpc_errors.writer
    async def FetchCut(self, request: chief_pb2.FetchCutRequest, context: Any) -> None:
        """Parameters and buffers of a committed checkpoint, tensor by tensor, or rows of a table in it."""
        if not request.params_only:
            raise ProtocolError("FetchCut returns only parameters and buffers; set params_only")
        if request.HasField("step"):
            step = int(request.step)
        else:
            step = await self._ask(lambda now_s: self._control.program.state.saves.checkpoint_step)
        if step < 0:
            raise CheckpointError("there is no checkpoint yet; ask again when the orders name one")
        if self.sending >= MOST_FETCHES:
            raise UnreachableError(f"the chief sends {MOST_FETCHES} checkpoints at a time; ask again")
        # Keep retention from deleting it while it is read.
        self.sending += 1
        self._store.protect(step)
        try:
            async with asyncio.timeout(FETCH_TIMES * self._timeouts.total_s):
                await self._send_cut(step, request, context)
        except TimeoutError:
            limit_s = FETCH_TIMES * self._timeouts.total_s
            raise UnreachableError(
                f"FetchCut of step {step} was ended: its caller has not read it within {limit_s:g} s"
            ) from None
        finally:
            self._store.unprotect(step)
            self.sending -= 1

    async def _send_cut(self, step: int, request: chief_pb2.FetchCutRequest, context: Any) -> None:
        checkpoint = self._with_rows
        if checkpoint is None or checkpoint.step != step or not request.table:
            checkpoint = await asyncio.to_thread(self._store.open, step, verify=False)
        found: dict[str, Callable[[], torch.Tensor]] = {
            spec.name: functools.partial(checkpoint.tensor, spec.name) for spec in checkpoint.tensors
        }
        if request.table:
            self._with_rows = checkpoint
            ids = tensor_from_bytes(request.ids, "int64")
            found = {request.table: functools.partial(checkpoint.rows, request.table, ids)}
        await context.send_initial_metadata(())
        first = True
        for name, read in found.items():
            async for frame in _tensor_frames(name, read):
                if first:
                    frame.step = step
                    first = False
                await rpc_errors.write(context, frame, self._timeouts.dead_s)


async def _tensor_frames(name: str, read: Callable[[], torch.Tensor]) -> AsyncIterator[chief_pb2.FetchCutFrame]:
    tensor = await asyncio.to_thread(read)
    data = tensor_bytes(tensor)
    head = chief_pb2.NamedTensor(
        name=name,
        shape=tuple(tensor.shape),
        dtype=DTYPE_TO_PROTO[str(tensor.dtype).removeprefix("torch.")],
        payload_bytes=len(data),
    )
    yield chief_pb2.FetchCutFrame(tensor=head, payload=bytes(data[:IMAGE_CHUNK_BYTES]))
    for offset in range(IMAGE_CHUNK_BYTES, len(data), IMAGE_CHUNK_BYTES):
        yield chief_pb2.FetchCutFrame(offset=offset, payload=bytes(data[offset : offset + IMAGE_CHUNK_BYTES]))


def register(servicer: ChiefServicer) -> Callable[[grpc.aio.Server], None]:
    """Registration function for RpcServer."""
    return lambda server: chief_pb2_grpc.add_ChiefServicer_to_server(servicer, server)


# Messages to values: everything from the network is checked here.


def join_from_proto(message: chief_pb2.JoinRequest) -> Join:
    """A Join. Raises ProtocolError if a name is too long or a list has too many items."""
    at_most(len(message.hello.machine), MAX_FIGURES, "Join: facts about the machine")
    at_most(len(message.hello.required_features), MAX_FIGURES, "Join: required features")
    for word in (*message.hello.machine, *message.hello.machine.values(), *message.hello.required_features):
        short(word, "Join: a fact about the machine or a required feature")
    for what, text in (("role", message.role), ("address", message.address), ("stable_id", message.stable_id)):
        if len(text) > MAX_NAME:
            raise ProtocolError(f"Join: {what} has {len(text)} characters; the limit is {MAX_NAME}")
    if message.role == "ps" and not message.address:
        raise ProtocolError("Join: a ps must give the address at which it serves")
    return from_message(
        Join,
        message,
        without={"secret"},
        index=message.index if message.HasField("index") else None,
        metrics_address=message.metrics_address[:MAX_NAME],
        device=message.device[:MAX_NAME],
        required_features=tuple(message.hello.required_features),
        machine=dict(message.hello.machine),
    )


def beat_from_proto(message: chief_pb2.Beat) -> Beat:
    """A heartbeat. Raises ProtocolError if it carries too many reports, or a name is too long."""
    if len(message.steps) > MAX_STEPS:
        raise ProtocolError(f"heartbeat of {message.task} has {len(message.steps)} steps; the limit is {MAX_STEPS}")
    _life(message, "heartbeat")
    where = f"heartbeat of {message.task}"
    short(message.failure, f"{where}: failure", MAX_SENTENCE)
    at_most(len(message.suspects), MAX_MEMBERS, f"{where}: suspects")
    # Some for each server.
    at_most(len(message.figures), MAX_FIGURES + MAX_TASKS, f"{where}: figures")
    at_most(len(message.passes), MAX_PASSES, f"{where}: passes")
    at_most(len(message.links.peers), MAX_MEMBERS, f"{where}: peers")
    for word in (*message.suspects, *message.figures, *(peer.task for peer in message.links.peers)):
        short(word, f"{where}: a suspect, a peer or the name of a figure")
    if message.HasField("ps"):
        # Raise ProtocolError if a server's status has more items than there can be.
        at_most(len(message.ps.shards), MAX_TENSORS, f"{where}: shards")
        at_most(len(message.ps.standbys), MAX_TENSORS, f"{where}: standbys")
        short(message.ps.failure, f"{where}: failure of the server", MAX_SENTENCE)
        for shard in message.ps.shards:
            at_most(len(shard.cuts), MAX_CUTS, f"{where}: cuts of shard {shard.shard}")
            at_most(len(shard.waiting_for), MAX_REPLICAS, f"{where}: replicas that shard {shard.shard} is waiting for")
            at_most(len(shard.tables), MAX_TENSORS, f"{where}: tables of shard {shard.shard}")
    steps = tuple(
        from_message(StepReport, item, **_measured(item), logged=_logged(item.logged, f"{where}: step {item.step}"))
        for item in message.steps
    )
    ps = ps_status_from_proto(message.ps) if message.HasField("ps") else None
    return from_message(Beat, message, steps=steps, ps=ps)


def _life(message: Any, where: str) -> None:
    """Raise ProtocolError if the name of the task is too long."""
    short(message.task, f"{where}: name of the task", MAX_NAME)


def _logged(message: Mapping[str, float], where: str) -> dict[str, float]:
    at_most(len(message), MAX_LOGGED, f"{where}: logged figures")
    return {short(name, f"{where}: name of a logged figure", MAX_LOGGED_NAME): message[name] for name in message}


def _measured(message: chief_pb2.StepReport) -> dict[str, Any]:
    """Figures that can't be negative; 0 for one that is, or is no number."""
    found = {name: getattr(message, name) for name in MEASURED}
    return {name: value if math.isfinite(value) and value >= 0.0 else 0.0 for name, value in found.items()}


PLACES = "shardline.rpc.v1.Places"
TAKE = f"/{PLACES}/Take"


class PlacesServicer(places_pb2_grpc.PlacesServicer):
    """Serves Places for one Control."""

    def __init__(self, control: Control, access: Access) -> None:
        self._control = control
        self._access = access

    @rpc_errors.unary
    async def Take(self, request: places_pb2.PlaceRequest, context: Any) -> places_pb2.PlaceReply:
        """An index, or why there is none."""
        for what, text in (("role", request.role), ("address", request.address)):
            if len(text) > MAX_NAME:
                raise ProtocolError(f"Take: {what} has {len(text)} characters; the limit is {MAX_NAME}")
        refusal = joining_refusal(request.role, self._access.caller(TAKE, context))
        if refusal:
            raise ForbiddenError(f"no index for {request.address}: {refusal}")
        # Normalized: a returning task is recognized by its address, and port 0, which many may send, by its form.
        address = format_address(*parse_address(request.address, "Take: the address"))
        answer = await asyncio.wrap_future(
            self._control.call(lambda now_s: self._control.program.place(request.role, address, now_s))
        )
        return to_message(places_pb2.PlaceReply, answer)


def register_places(control: Control, access: Access) -> Callable[[grpc.aio.Server], None]:
    """Registration function for RpcServer."""
    return lambda server: places_pb2_grpc.add_PlacesServicer_to_server(PlacesServicer(control, access), server)
