"""The receiving half of lanes for parcels: sockets that other workers open with a token, each read by a thread.

A thread for each socket, not one for all: one system call without the interpreter's lock receives a whole tensor, and
wakes whoever computes with it. A worker has few neighbours.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from shardline.core.identity import Identity
from shardline.errors import ProtocolError, ShardlineError
from shardline.lanes.base import LaneUnavailable
from shardline.lanes.call_frames import HEADER, Kind, failure, frame
from shardline.lanes.parcels import Inbox
from shardline.lanes.tcp.frames import be_patient
from shardline.lanes.tcp.server import Listening
from shardline.lanes.tls_socket import TlsSocket, shut
from shardline.lanes.token_acceptor import TokenAcceptor
from shardline.rpc.errors import status_of
from shardline.rpc.limits import MAX_NAME, MB
from shardline.rpc.messages.parcels import ParcelReader
from shardline.rpc.v1 import worker_pb2

if TYPE_CHECKING:
    from shardline.config import RoleConfig
    from shardline.lanes.kind import LaneKind

log = logging.getLogger("shardline.lanes")
MAX_HEADER_BYTES = 1 * MB
"""Of a parcel: the state of a random generator, and shapes."""
SCRATCH_BYTES = 256 << 10
Refused = Callable[[str, Exception], None]
"""(what was refused, why)."""


class ParcelPort:
    """One lane of one worker: it accepts sockets of checked senders, and hands on what comes."""

    def __init__(self, listening: Listening, inbox: Inbox, *, timeout_s: float, on_refused: Refused) -> None:
        """timeout_s: for which a token is valid, a parcel may wait for its step, and its bytes may stall."""
        self._listening = listening
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._receivers: dict[str, ParcelReceiver] = {}
        """By task."""
        self._closed = False
        self._acceptor: TokenAcceptor[Callable[[socket.socket], None]] = TokenAcceptor(
            listening.listener, listening.handshake, label="parcels", valid_s=timeout_s, on_refused=on_refused
        )

    def open(self, who: Identity) -> worker_pb2.OpenParcelLaneReply:
        """What a checked sender needs to connect."""
        token = self._acceptor.grant(lambda sock: self._take(who, sock))
        return worker_pb2.OpenParcelLaneReply(
            offered=True, token=token, port=self._listening.port, socket=self._listening.path
        )

    def _take(self, who: Identity, sock: socket.socket) -> None:
        """Read a socket from now on, in place of the sender's earlier one. Called on the socket thread."""
        receiver = ParcelReceiver(who, sock, self._inbox, timeout_s=self._timeout_s, on_refused=self._on_refused)
        with self._lock:
            before = None if self._closed else self._receivers.get(who.task)
            if not self._closed:
                self._receivers[who.task] = receiver
        if self._closed:
            sock.close()
            return
        if before is not None:
            before.end()
        receiver.start()

    def keep_only(self, lives: Collection[tuple[str, int]]) -> None:
        """End the sockets of other lives than these: (task, incarnation)."""
        with self._lock:
            left = {task for task, one in self._receivers.items() if (task, one.who.incarnation) not in lives}
            ended = [self._receivers.pop(task) for task in left]
        for receiver in ended:
            receiver.end()

    def close(self) -> None:
        """Accept no more, end all sockets and their threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._acceptor.close()
        self._listening.close()
        for receiver in self._receivers.values():
            receiver.end()
        for receiver in self._receivers.values():
            receiver.join(self._timeout_s)


class ParcelReceiver:
    """Reads one sender's parcels, one after another, on a thread of its own."""

    def __init__(
        self, who: Identity, sock: socket.socket, inbox: Inbox, *, timeout_s: float, on_refused: Refused
    ) -> None:
        self.who = who
        self._sock = sock
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._on_refused = on_refused
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"parcels from {who.task}", daemon=True)

    def start(self) -> None:
        be_patient(self._sock, self._timeout_s)
        self._thread.start()

    def end(self) -> None:
        """End the socket's use; its thread frees it."""
        self._ended = True
        shut(self._sock)

    def join(self, timeout_s: float) -> None:
        """Wait for its thread, after end()."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                self._take_one()
        except OSError as error:
            log.debug("parcels from %s: %s", self.who.task, error or type(error).__name__)
        except ShardlineError as error:
            # What follows on this socket has no meaning any more; the sender opens another one.
            log.debug("parcels from %s: %s", self.who.task, error)
            if isinstance(error, ProtocolError):
                self._on_refused("parcels", error)
            self._answer(failure(*status_of(error, self.who.task)))
        finally:
            self._sock.close()

    def _take_one(self) -> None:
        """A call of its own, so that nothing of a parcel is kept while the next one is waited for."""
        reader = ParcelReader(self._header())
        if self._inbox.awaits(reader, wait_s=self._timeout_s):
            while len(room := reader.room()):
                reader.filled(self._receive(room))
            self._inbox.deliver(self.who, reader.timeline, reader.parcel())
        else:
            nbytes = reader.nbytes
            scratch = memoryview(bytearray(min(nbytes, SCRATCH_BYTES)))
            while nbytes:
                nbytes -= self._receive(scratch[: min(nbytes, len(scratch))])
        self._answer(frame(Kind.DONE))

    def _header(self) -> worker_pb2.ParcelHeader:
        start = memoryview(bytearray(HEADER.size))
        self._fill(start, idle=True)
        kind, length = HEADER.unpack(start)
        if kind != Kind.REQUEST or length > MAX_HEADER_BYTES:
            raise ProtocolError(f"the bytes on a socket for parcels are none: a frame of kind {kind}, {length} bytes")
        body = memoryview(bytearray(length))
        self._fill(body)
        try:
            header = worker_pb2.ParcelHeader.FromString(bytes(body))
        except DecodeError as error:
            raise ProtocolError(f"the header of a parcel can't be parsed: {error}") from error
        if header.task or header.secret or len(header.job) > MAX_NAME:
            raise ProtocolError("the header of a parcel on a lane names a sender, or its job's name is too long")
        return header

    def _fill(self, memory: memoryview, *, idle: bool = False) -> None:
        """Receive so many bytes. idle: there need not be any for a long time."""
        while len(memory):
            try:
                count = self._receive(memory)
            except TimeoutError:
                if not idle or self._ended:
                    raise
                continue
            memory = memory[count:]
            idle = False

    def _receive(self, memory: memoryview) -> int:
        """Receive as much as there is, of a plain socket all. Raises TimeoutError, or OSError for a socket at its end.

        No call waits longer than timeout_s without a byte.
        """
        try:
            if isinstance(self._sock, TlsSocket):
                count = self._sock.recv_into(memory)
            else:
                count = self._sock.recv_into(memory, 0, socket.MSG_WAITALL)
        except (BlockingIOError, ssl.SSLWantReadError):
            raise TimeoutError(f"no byte came for {self._timeout_s:.1f} s") from None
        if count == 0:
            raise ConnectionAbortedError("the sender closed the socket")
        return count

    def _answer(self, data: bytes) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            log.debug("answering %s: %s", self.who.task, error or type(error).__name__)


class ParcelPorts:
    """The lanes on which a worker takes parcels; each begins to listen when it is asked for. Any thread may use it."""

    def __init__(self, config: RoleConfig, kinds: Collection[LaneKind], inbox: Inbox, on_refused: Refused) -> None:
        self._config = config
        self._kinds = {kind.name: kind for kind in kinds}
        self._inbox = inbox
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._ports: dict[str, ParcelPort] = {}
        self._closed = False

    def open(self, lane: str, who: Identity) -> worker_pb2.OpenParcelLaneReply:
        """Prepare a connection for a checked sender, or say why there is none."""
        try:
            return self._port(lane).open(who)
        except LaneUnavailable as reason:
            return worker_pb2.OpenParcelLaneReply(reason=str(reason))

    def _port(self, lane: str) -> ParcelPort:
        with self._lock:
            if lane not in self._kinds or self._closed:
                offered = ", ".join(["grpc", *self._kinds])
                raise LaneUnavailable(f"{self._config.task} offers the lanes {offered} for parcels")
            if lane not in self._ports:
                self._ports[lane] = ParcelPort(
                    self._kinds[lane].listen(self._config),
                    self._inbox,
                    timeout_s=self._config.timeouts.rpc_s,
                    on_refused=self._on_refused,
                )
            return self._ports[lane]

    def keep_only(self, lives: Collection[tuple[str, int]]) -> None:
        with self._lock:
            ports = list(self._ports.values())
        for port in ports:
            port.keep_only(lives)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ports = list(self._ports.values())
        for port in ports:
            port.close()
