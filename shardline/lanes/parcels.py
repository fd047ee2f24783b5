"""The gRPC service by which workers hand each other activations and gradients: see worker.proto."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shardline.errors import ProtocolError
from shardline.pipeline.parcel import Parcel
from shardline.rpc.channel import Peer
from shardline.rpc.messages.parcels import ParcelReader, parcel_frames
from shardline.rpc.v1 import worker_pb2, worker_pb2_grpc

WORKER = "shardline.rpc.v1.Worker"
Deliver = Callable[[str, int, Parcel], bool]
"""(job, timeline, parcel) -> whether it was kept. Called on the server's loop, so it must not wait."""


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Takes parcels in."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    async def Deliver(self, requests: AsyncIterator[worker_pb2.ParcelFrame], context: Any) -> worker_pb2.ParcelReply:
        """Read one parcel; it is kept only whole, with its digest right."""
        reader: ParcelReader | None = None
        async for frame in requests:
            if reader is None:
                if not frame.HasField("header"):
                    raise ProtocolError("a parcel must begin with its header")
                reader = ParcelReader(frame.header)
            elif frame.HasField("header"):
                raise ProtocolError(f"{reader.key}: a second header")
            reader.add(frame.payload)
        if reader is None:
            raise ProtocolError("a parcel must begin with its header")
        return worker_pb2.ParcelReply(kept=self._deliver(reader.job, reader.timeline, reader.parcel()))


def register_worker(deliver: Deliver) -> Callable[[grpc.aio.Server], None]:
    """Registration function for RpcServer."""
    return lambda server: worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(deliver), server)


def send_parcel(peer: Peer, job: str, timeline: int, parcel: Parcel, *, timeout_s: float) -> bool:
    """Deliver one parcel; returns whether it was kept. Raises what Peer.failure() makes of a failed call."""
    start_s = time.monotonic()
    stub = worker_pb2_grpc.WorkerStub(peer.channel)
    try:
        return bool(stub.Deliver(parcel_frames(job, timeline, parcel), timeout=timeout_s).kept)
    except grpc.RpcError as error:
        waited_s = time.monotonic() - start_s
        raise peer.failure(error, what=f"Deliver of {parcel.key}", waited_s=waited_s) from error
