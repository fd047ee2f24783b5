"""The gRPC service by which workers hand each other activations and gradients: worker.proto. It opens lanes too."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc

from shardline.core.identity import Identity
from shardline.core.parcel import Parcel
from shardline.errors import ProtocolError
from shardline.rpc.channel import Peer
from shardline.rpc.errors import unary
from shardline.rpc.messages.data import lane_name, lane_number
from shardline.rpc.messages.parcels import Packed, ParcelReader, parcel_frames
from shardline.rpc.v1 import worker_pb2, worker_pb2_grpc

WORKER = "shardline.rpc.v1.Worker"


class Inbox(Protocol):
    """Takes in a worker's parcels. Any thread may use it."""

    def check_sender(self, who: Identity) -> None:
        """Raise ForbiddenError if a life has not shown its secret, UnreachableError if it computes no stage here (yet).

        A worker learns who computes stages from the chief's orders, so others may know it earlier.
        """

    def awaits(self, parcel: ParcelReader, *, wait_s: float) -> bool:
        """Whether a parcel may still be needed. Waits while this worker is behind its step.

        Raises UnreachableError if it still is after wait_s, ProtocolError for a pass that the job does not have.
        """

    def deliver(self, who: Identity, timeline: int, parcel: Parcel) -> bool:
        """Take in a parcel; False if it is for a step that is over here."""


Open = Callable[[str, Identity], worker_pb2.OpenParcelLaneReply]
"""(lane, checked sender) -> the reply."""


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Takes parcels in, and lets other workers open lanes for them."""

    def __init__(self, inbox: Inbox, open_lane: Open) -> None:
        self._inbox = inbox
        self._open_lane = open_lane

    @unary
    async def OpenParcelLane(
        self, request: worker_pb2.OpenParcelLaneRequest, context: Any
    ) -> worker_pb2.OpenParcelLaneReply:
        """Prepare a connection for one life of another worker."""
        who = Identity(request.task, request.incarnation, request.secret)
        self._inbox.check_sender(who)
        return self._open_lane(lane_name(request.lane) or f"number {request.lane}", who)

    @unary
    async def Deliver(self, requests: AsyncIterator[worker_pb2.ParcelFrame], context: Any) -> worker_pb2.ParcelReply:
        """Read one parcel; it is kept only whole, with its digest right."""
        reader: ParcelReader | None = None
        async for frame in requests:
            if reader is None:
                if not frame.HasField("header"):
                    raise ProtocolError("a parcel must begin with its header")
                reader = ParcelReader(frame.header)
                self._inbox.check_sender(reader.sender)
                if not self._inbox.awaits(reader, wait_s=0.0):
                    return worker_pb2.ParcelReply(kept=False)
            elif frame.HasField("header"):
                raise ProtocolError(f"{reader.key}: a second header")
            reader.add(frame.payload)
        if reader is None:
            raise ProtocolError("a parcel must begin with its header")
        return worker_pb2.ParcelReply(kept=self._inbox.deliver(reader.sender, reader.timeline, reader.parcel()))


def register_worker(inbox: Inbox, open_lane: Open) -> Callable[[grpc.aio.Server], None]:
    """Registration function for RpcServer."""
    return lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(inbox, open_lane), server)


def send_parcel(peer: Peer, packed: Packed, who: Identity, *, timeout_s: float) -> bool:
    """Deliver one parcel by gRPC; returns whether it was kept. Raises what Peer.failure() makes of a failed call."""
    start_s = time.monotonic()
    stub = worker_pb2_grpc.WorkerStub(peer.channel)
    try:
        return bool(stub.Deliver(parcel_frames(packed, who), timeout=timeout_s).kept)
    except grpc.RpcError as error:
        waited_s = time.monotonic() - start_s
        raise peer.failure(error, what=f"Deliver of {packed.key}", waited_s=waited_s) from error


def ask_for_lane(peer: Peer, lane: str, who: Identity, *, timeout_s: float) -> worker_pb2.OpenParcelLaneReply:
    """Ask another worker for a lane. Raises what Peer.failure() makes of a failed call."""
    start_s = time.monotonic()
    stub = worker_pb2_grpc.WorkerStub(peer.channel)
    request = worker_pb2.OpenParcelLaneRequest(
        task=who.task, incarnation=who.incarnation, secret=who.secret, lane=lane_number(lane)
    )
    try:
        reply: worker_pb2.OpenParcelLaneReply = stub.OpenParcelLane(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise peer.failure(error, what="OpenParcelLane", waited_s=time.monotonic() - start_s) from error
    return reply
