"""Parcels between workers, activations and gradients: the gRPC service (worker.proto) and the sending half of lanes."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from shardline.cluster import parse_address
from shardline.core.identity import Identity
from shardline.core.parcel import Parcel
from shardline.errors import ProtocolError, ShardlineError, UnreachableError
from shardline.host.ports import on_this_host
from shardline.host.segments import SegmentError
from shardline.lanes import candidates
from shardline.lanes.call_frames import MAX_REPLY_BYTES, CallFrameReader, Kind, frame, read_failure
from shardline.lanes.negotiated import BREAKS, Fallback
from shardline.lanes.tls_socket import NOT_READY, TlsSocket, shut
from shardline.rpc.channel import Peer
from shardline.rpc.errors import unary
from shardline.rpc.messages.data import lane_name, lane_number
from shardline.rpc.messages.fields import to_message
from shardline.rpc.messages.parcels import Packed, ParcelReader, parcel_frames
from shardline.rpc.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from shardline.config import RoleConfig

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
        async for part in requests:
            if reader is None:
                if not part.HasField("header"):
                    raise ProtocolError("a parcel must begin with its header")
                reader = ParcelReader(part.header)
                self._inbox.check_sender(reader.sender)
                if not self._inbox.awaits(reader, wait_s=0.0):
                    return worker_pb2.ParcelReply(kept=False)
            elif part.HasField("header"):
                raise ProtocolError(f"{reader.key}: a second header")
            reader.add(part.payload)
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
    request = to_message(worker_pb2.OpenParcelLaneRequest, who, lane=lane_number(lane))
    try:
        reply: worker_pb2.OpenParcelLaneReply = stub.OpenParcelLane(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise peer.failure(error, what="OpenParcelLane", waited_s=time.monotonic() - start_s) from error
    return reply


log = logging.getLogger("shardline.lanes")
ANSWER_BYTES = 4 << 10
SEND_BUFFER_BYTES = 4 << 20
"""Asked of the kernel, which may give less: what fits is sent without waiting for the receiver."""
RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ParcelLine:
    """Sends whole parcels over a socket, one after another. Used by one thread at a time; any thread may shut() it."""

    def __init__(self, lane: str, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setblocking(False)
        self.lane = lane
        self._sock = sock
        self._left: deque[memoryview] = deque()
        self._reader = CallFrameReader(MAX_REPLY_BYTES)
        self._failure: Exception | None = None
        """What follows the answers that were counted."""

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def begin(self, packed: Packed) -> bool:
        """Send a parcel as far as there is room; True if all of it has left. Call it when the line isn't busy."""
        start = frame(Kind.REQUEST, packed.header.SerializeToString())
        self._left.extend(memory for memory in (memoryview(start), *packed.payloads) if len(memory))
        return self.go_on()

    def go_on(self) -> bool:
        """Send more of the begun parcel, as far as there is room; True if all of it has left. Raises OSError."""
        while self._left:
            try:
                if isinstance(self._sock, TlsSocket):
                    count = self._sock.send(self._left[0])
                else:
                    count = self._sock.sendmsg(self._left)
            except NOT_READY:
                return False
            while count and count >= len(self._left[0]):
                count -= len(self._left.popleft())
            if count:
                self._left[0] = self._left[0][count:]
        return True

    def finish(self, stall_s: float) -> None:
        """Send the rest of the begun parcel. Raises OSError; TimeoutError after stall_s without progress."""
        while not self.go_on():
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            if not poll.poll(1e3 * stall_s):
                raise TimeoutError(f"the receiver took no byte for {stall_s:.1f} s")

    def answers(self) -> int:
        """Number of parcels answered since the last call; waits for none.

        Raises what the receiver answered for one that it refused, or OSError if the socket has ended: once it has
        returned the number of those that were answered before.
        """
        count = 0
        try:
            while self._failure is None:
                data = self._sock.recv(ANSWER_BYTES)
                if not data:
                    raise ConnectionAbortedError("the receiver closed the socket")
                for kind, body in self._reader.feed(data):
                    if kind is Kind.FAILED:
                        error = read_failure(body)
                        raise (UnreachableError if error.code in RETRIED else ProtocolError)(str(error)) from error
                    if kind is not Kind.DONE:
                        raise ProtocolError(f"the receiver of parcels sent a frame of kind {kind.name}")
                    count += 1
        except NOT_READY:
            return count
        except (OSError, ShardlineError) as error:
            self._failure = error
        if count or self._failure is None:
            return count
        raise self._failure

    def shut(self) -> None:
        shut(self._sock)

    def close(self) -> None:
        self._sock.close()


class ParcelWay:
    """Opens the best lane for parcels to one worker; the last one, gRPC, needs no opening. Used by one thread."""

    def __init__(self, config: RoleConfig, peer: Peer, who: Identity, on_fallback: Fallback) -> None:
        """on_fallback: called with (lane, reason) for a requested lane that can't be used."""
        self._config = config
        self._peer = peer
        self._who = who
        self._on_fallback = on_fallback
        kinds = candidates(
            config.lane, local=on_this_host(parse_address(peer.address)[0]) or config.run_dir is not None
        )
        self._left = deque(kinds)
        self._breaks = 0

    @property
    def lane(self) -> str:
        """Name of the lane in use, or of the next to try."""
        return self._left[0].name

    def connect(self, timeout_s: float) -> ParcelLine | None:
        """A new line; None = gRPC. Raises UnreachableError and what else Peer.failure() makes of a failed call."""
        while len(self._left) > 1:
            kind = self._left[0]
            reply = ask_for_lane(self._peer, kind.name, self._who, timeout_s=timeout_s)
            if not reply.offered:
                self._leave(reply.reason)
                continue
            try:
                line = ParcelLine(kind.name, kind.dial(self._config, self._peer.address, reply, timeout_s=timeout_s))
            except (OSError, SegmentError) as error:
                # It has just answered a call, so it is the lane that does not work.
                self._leave(f"{reply.socket or f'port {reply.port}'}: {error or type(error).__name__}")
                continue
            log.info("%s: lane %s for parcels", self._peer, kind.name)
            return line
        return None

    def broke(self, error: Exception) -> None:
        """Note that a line broke: another lane takes over if that goes on."""
        self._breaks += 1
        if self._breaks >= BREAKS and len(self._left) > 1:
            self._leave(f"it broke {self._breaks} times in a row, most recently: {error or type(error).__name__}")

    def works(self) -> None:
        self._breaks = 0

    def _leave(self, reason: str) -> None:
        lane = self._left.popleft().name
        self._breaks = 0
        log.warning("%s: lane %s can't be used for parcels (%s); using %s", self._peer, lane, reason, self.lane)
        self._on_fallback(lane, reason)
