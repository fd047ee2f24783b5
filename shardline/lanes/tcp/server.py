"""The server half of lane tcp: one port for the bulk sockets of all workers, and two threads however many there are.

One accepts sockets, the native engine moves their bytes.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from shardline.core.plan import ShardSpec
from shardline.errors import UsageError
from shardline.host.process import kept_from_children
from shardline.lanes.attachments import Holder, Hosted, Opening
from shardline.lanes.call_server import Answers
from shardline.lanes.socket_thread import SocketThread
from shardline.lanes.tcp import frames
from shardline.lanes.tcp.attachment import TcpAttachment
from shardline.lanes.tls_socket import TlsSocket
from shardline.lanes.token_acceptor import MAX_GUESTS, TokenAcceptor
from shardline.native.engine import Engine

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
        self._doorman = SocketThread("bulk-accept")
        self._engine = Engine("bulk")
        self.acceptor: TokenAcceptor[Take] = TokenAcceptor(
            listener,
            self._doorman,
            lambda sock, address: BulkHandshake(sock, address, server_context),
            label="bulk",
            valid_s=timeout_s,
            on_refused=on_refused,
        )
        self._closed = False
        self.acceptor.open()

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
        self._doorman.close()
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
