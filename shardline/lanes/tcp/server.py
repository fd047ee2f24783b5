"""The server half of lane tcp: one port for the bulk sockets of all workers, and two threads however many there are.

One accepts sockets, the native engine moves their bytes (lines.py), and calls are served on the loop. An error of one
of a worker's three sockets closes all: a raw byte stream can't be resumed in the middle.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardline.core.plan import ShardSpec
from shardline.core.tensor_bytes import Buffer, tensor_from_bytes
from shardline.errors import ProtocolError, UnreachableError, UsageError
from shardline.host.loops import post
from shardline.host.process import kept_from_children
from shardline.lanes.attachments import Holder, Hosted, Opening
from shardline.lanes.call_server import Answers, CallServer
from shardline.lanes.tcp import frames
from shardline.lanes.tcp.lines import EngineReceive, EngineSend, Posted
from shardline.lanes.tls_socket import TlsSocket
from shardline.lanes.token_acceptor import MAX_GUESTS, TokenAcceptor
from shardline.native.engine import Engine
from shardline.storage.bucket import Intact

WINDOW = 8
"""Buckets of a push that may be incoming at once: enough to keep the socket busy while others are counted."""
QUEUED_BYTES = 4 << 20
"""Bytes that may be queued before send() blocks its caller."""


class TcpTicket(Posted):
    """One incoming referred bucket; see attachments.Ticket."""

    def __init__(self, attachment: TcpAttachment, memory: memoryview, digest: int) -> None:
        super().__init__(memory, digest)
        self._attachment = attachment

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived, or never will."""
        return self.whole or bool(self._attachment.failure)

    def tensor(self, dtype: str) -> torch.Tensor:
        return tensor_from_bytes(self.memory, dtype)

    async def wait(self) -> None:
        if not self.whole:
            await self._attachment.arrivals.until(lambda: self.done)
            if not self.whole:
                raise UnreachableError(self._attachment.failure)


class Changes:
    """Wakes the coroutines that wait for one end of the bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for a condition that happened() follows."""
        while not ready():
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            # Check again: the condition may have become true before the waiter was visible.
            if ready():
                return
            await waiter

    def happened(self) -> None:
        """Have the conditions looked at again. From any thread."""
        if self._waiters:
            post(self._loop, self.wake)

    def wake(self) -> None:
        """The same on the loop's own thread, which then need not be woken."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class TcpAttachment:
    """One open tcp lane; see attachments.Attachment.

    answers: serves the calls. engine: moves the bytes. limit_s: seconds for which a transfer may make no progress.
    take: memory for an incoming bucket. forget: called once when the attachment can't be used any more.
    """

    lane = "tcp"
    borrowed = False
    window = WINDOW

    def __init__(
        self,
        holder: Holder,
        loop: asyncio.AbstractEventLoop,
        answers: Answers,
        *,
        engine: Engine,
        limit_s: float,
        take: Callable[[int], memoryview],
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.holder = holder
        self.failure = ""
        self._loop = loop
        self._take = take
        self._forget = forget
        self._failing = threading.Lock()
        self.arrivals, self._room = Changes(loop), Changes(loop)
        self.incoming = EngineReceive(engine, loop, limit_s, self.arrivals.wake, self._fail)
        self.outgoing = EngineSend(engine, loop, limit_s, self._room.wake, self._fail)
        self.calls = CallServer(loop, answers, who=holder.task, broke=self._fail)

    def expect(self, offset: int, nbytes: int, digest: int) -> TcpTicket:
        if offset:
            raise ProtocolError(f"a bucket on lane tcp has offset {offset}; it must be 0")
        self._check()
        ticket = TcpTicket(self, self._take(nbytes), digest)
        if not ticket.whole:
            self.incoming.expect(ticket)
            # It may have broken before this ticket was known.
            self._check()
        return ticket

    def published(self, bucket: int, step: int) -> None:
        """Nothing is read in place on this lane."""

    def reply_slot(self, bucket: int, nbytes: int) -> None: ...

    async def send(self, payload: Buffer, intact: Intact | None) -> None:
        self._check()
        view = memoryview(payload)
        if view.nbytes == 0:
            return
        self.outgoing.put(view.cast("B"), intact)
        if self.outgoing.queued_bytes > QUEUED_BYTES:
            await self._room.until(lambda: bool(self.failure) or self.outgoing.queued_bytes <= QUEUED_BYTES)
            self._check()

    def abort(self, reason: str) -> None:
        self._fail(reason)

    def close(self) -> None:
        self._fail("it was closed")

    def _check(self) -> None:
        if self.failure:
            raise UnreachableError(self.failure)

    def _fail(self, reason: str) -> None:
        with self._failing:
            if self.failure:
                return
            self.failure = (
                f"the bulk sockets of {self.holder.task} (incarnation {self.holder.incarnation:#x}) to shard "
                f"{self.holder.shard} are closed: {reason}"
            )
        self.incoming.fail()
        self.outgoing.fail()
        self.calls.close()
        self._forget()
        self.arrivals.happened()
        self._room.happened()


_WILDCARDS = ("", "*", "0.0.0.0", "::")

Take = Callable[[socket.socket], None]


class BulkHandshake:
    """The preamble of a bulk socket; see token_acceptor.Handshake."""

    def __init__(self, sock: socket.socket, address: str, tls: ssl.SSLContext | None) -> None:
        self.sock = sock
        self.who = f"bulk connection from {address}"
        self._tls = tls
        self._tuned = False
        self._preamble = bytearray(frames.PREAMBLE_BYTES)
        self._filled = 0

    def hear(self) -> bytes:
        if not self._tuned:
            self.tune()
            if self._tls is not None:
                self.sock = TlsSocket(self.sock, self._tls, name=None)
            self._tuned = True
        if self._tls is not None:
            self.sock.do_handshake()  # type: ignore[attr-defined]
            self._tls = None
        while self._filled < len(self._preamble):
            count = self.sock.recv_into(memoryview(self._preamble)[self._filled :])
            if count == 0:
                raise ConnectionAbortedError("closed without a token")
            self._filled += count
        return frames.read_preamble(self._preamble)

    def tune(self) -> None:
        """Set the options of a new socket. Raises ProtocolError or OSError for one that is refused."""
        frames.tune(self.sock)

    def admit(self, bearer: Take) -> None:
        self.sock.send(frames.ACCEPTED)
        bearer(self.sock)

    def refuse(self) -> None:
        self.sock.send(frames.REFUSED)

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True)
class Listening:
    """Where a lane's sockets for parcels are opened."""

    listener: socket.socket
    """Non-blocking."""
    handshake: Callable[[socket.socket, str], BulkHandshake]
    """(socket, address) -> its handshake."""
    port: int = 0
    path: str = ""
    """The unix socket, if it is one."""
    close: Callable[[], None] = lambda: None
    """Removes what the listener leaves behind."""


class TcpOffer:
    """Offers lane tcp on a free port of one interface; see attachments.LaneOffer.

    host: from the server's own address. server_context: for both directions, if the cluster has TLS. timeout_s: seconds
    for which a token is valid, and for which a transfer may make no progress (a third of --timeout). take: memory for
    incoming data. on_refused: called on the accepting thread for every connection that was turned away. Raises
    UsageError if the interface can't be listened on.
    """

    lane = "tcp"
    keeps_replies = False

    def __init__(
        self,
        host: str,
        server_context: ssl.SSLContext | None = None,
        *,
        timeout_s: float,
        take: Callable[[int], memoryview],
        on_refused: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        listener = listen(host)
        self.port: int = listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._take = take
        self._engine = Engine("bulk")
        self.acceptor: TokenAcceptor[Take] = TokenAcceptor(
            listener,
            lambda sock, address: BulkHandshake(sock, address, server_context),
            label="bulk",
            valid_s=timeout_s,
            on_refused=on_refused,
        )
        self._closed = False

    def open(self, holder: Holder, hosted: Hosted, loop: asyncio.AbstractEventLoop, answers: Answers) -> Opening:
        """An attachment, still without sockets, and the tokens with which the worker opens them."""
        attachment = TcpAttachment(
            holder,
            loop,
            answers,
            engine=self._engine,
            limit_s=self._timeout_s,
            take=self._take,
            forget=lambda: self.acceptor.revoke(up, down, call),
        )
        up, down, call = (
            self.acceptor.grant(end.attach) for end in (attachment.incoming, attachment.outgoing, attachment.calls)
        )
        return Opening(attachment=attachment, port=self.port, up_token=up, down_token=down, call_token=call)

    def publish(self, spec: ShardSpec, *, keeps_previous: bool) -> None:
        """Nothing is read in place on this lane."""

    def close(self) -> None:
        """Accept no more sockets and end the threads; attachments are closed before. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.acceptor.close()
        self._engine.close()


def listen(host: str) -> socket.socket:
    """A non-blocking listener on a free port of one interface. Raises UsageError if there is none."""
    name = host.strip("[]")
    try:
        if name in _WILDCARDS:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=MAX_GUESTS)
        else:
            family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=MAX_GUESTS)
    except OSError as error:
        raise UsageError(
            f"can't listen for bulk sockets on {host} ({error}); does it belong to this machine?"
        ) from error
    listener.setblocking(False)
    return kept_from_children(listener)
