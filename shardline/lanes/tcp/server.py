"""The tcp lane of a ps: one port for the bulk sockets of all workers, two threads whatever their number."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardline.errors import ProtocolError, UsageError
from shardline.lanes.attachments import Holder, Opening
from shardline.lanes.socket_thread import READ, WRITE, SocketThread
from shardline.lanes.tcp import frames as bulk
from shardline.lanes.tcp.attachment import TcpAttachment
from shardline_ps.shard.shard import Shard

log = logging.getLogger("shardline.ps")
MAX_VISITORS = 64
"""Connections that have not shown a token yet; the kernel keeps more of them waiting."""
VISIT_S = 5.0
"""How long one of them may take."""
_WILDCARDS = ("", "*", "0.0.0.0", "::")
_KEY_BYTES = 8

Take = Callable[[socket.socket], None]


T = TypeVar("T")


@dataclass(frozen=True)
class _Granted(Generic[T]):
    token: bytes
    take: T
    until_s: float


class Tokens(Generic[T]):
    """One-time tokens, each for one connection of one attachment. Thread-safe."""

    def __init__(self, valid_s: float) -> None:
        self._valid_s = valid_s
        self._lock = threading.Lock()
        # Found by its first bytes, in any time; compared as a whole, in a time that tells nothing of the others.
        self._granted: dict[bytes, _Granted[T]] = {}

    def grant(self, take: T, *, now_s: float) -> bytes:
        """A token whose bearer is handed to `take`."""
        token = bulk.new_token()
        with self._lock:
            self._prune(now_s)
            self._granted[token[:_KEY_BYTES]] = _Granted(token, take, now_s + self._valid_s)
        return token

    def redeem(self, token: bytes, *, now_s: float) -> T | None:
        """Whom the bearer is handed to; None where the token is wrong, was used before or comes late."""
        with self._lock:
            self._prune(now_s)
            held = self._granted.get(token[:_KEY_BYTES])
            if held is None or not hmac.compare_digest(held.token, token):
                return None
            del self._granted[token[:_KEY_BYTES]]
            return held.take

    def revoke(self, token: bytes) -> None:
        """It is good for nothing any more. May be called twice."""
        with self._lock:
            self._granted.pop(token[:_KEY_BYTES], None)

    def _prune(self, now_s: float) -> None:
        # All are valid for the same time, so the oldest come first.
        for key, held in list(self._granted.items()):
            if held.until_s > now_s:
                return
            del self._granted[key]

    def __len__(self) -> int:
        return len(self._granted)


class _Visitor:
    """A connection that has not shown its token yet. Used by the receive thread."""

    limit_s = VISIT_S

    def __init__(self, door: Door, sock: socket.socket, address: str) -> None:
        self.moved_s = time.monotonic()
        self._door = door
        self.sock = sock
        self.address = address
        self._preamble = bytearray(bulk.PREAMBLE_BYTES)
        self._filled = 0
        self._secured = not isinstance(sock, ssl.SSLSocket)

    def stalled(self) -> None:
        """It said nothing."""
        self._door.leaves(self, f"no token within {self.limit_s:.0f} s")

    def step(self) -> None:
        """Take what it says."""
        try:
            if not self._secured:
                self.sock.do_handshake()  # type: ignore[attr-defined]
                self._secured = True
            while self._filled < len(self._preamble):
                count = self.sock.recv_into(memoryview(self._preamble)[self._filled :])
                if count == 0:
                    self._door.leaves(self, "closed without a token")
                    return
                self._filled += count
        except ssl.SSLWantWriteError:
            self._door.thread.watch(self.sock, WRITE, self.step)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._door.thread.watch(self.sock, READ, self.step)
        except OSError as error:
            self._door.leaves(self, str(error))
        else:
            self._door.shows(self, self._preamble)


class Door:
    """The listening socket, and who stands before it. Used by the receive thread, but for open() and close()."""

    limit_s = 1.0
    """Pause where the machine lets nobody in."""

    def __init__(
        self,
        listener: socket.socket,
        thread: SocketThread,
        tokens: Tokens[Take],
        tls: ssl.SSLContext | None,
        on_refused: Callable[[str, Exception], None],
    ) -> None:
        self.thread = thread
        self.moved_s = 0.0
        self.refused = 0
        """Connections that were sent away."""
        self._listener = listener
        self._tokens = tokens
        self._tls = tls
        self._on_refused = on_refused
        self._visitors: set[_Visitor] = set()
        self._closed = False

    @property
    def visitors(self) -> int:
        """Connections that have not shown a token yet."""
        return len(self._visitors)

    def open(self) -> None:
        """Take visitors. From any thread."""
        self.thread.post(self._look)

    def close(self) -> None:
        """Take no more, and send away who is there. From any thread, before the thread ends."""
        self.thread.post(self._close)

    def _close(self) -> None:
        self._closed = True
        self.thread.unguard(self)
        self.thread.unwatch(self._listener)
        self._listener.close()
        for visitor in list(self._visitors):
            self.leaves(visitor, "this ps ends")

    def _accept(self) -> None:
        while len(self._visitors) < MAX_VISITORS:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:
                # Most likely no descriptors are left, and the next try would fail at once too.
                log.warning("can't take a bulk connection: %s; trying again in %.0f s", error, self.limit_s)
                self.moved_s = time.monotonic()
                self.thread.guard(self)
                break
            self._enters(sock, f"{address[0]}:{address[1]}")
        self.thread.unwatch(self._listener)

    def stalled(self) -> None:
        """The pause after a failed accept is over."""
        self.thread.unguard(self)
        self._look()

    def _look(self) -> None:
        if not self._closed:
            self.thread.watch(self._listener, READ, self._accept)

    def _enters(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setblocking(False)
            bulk.tune(sock)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError as error:
            sock.close()
            self._count(address, str(error))
            return
        visitor = _Visitor(self, sock, address)
        self._visitors.add(visitor)
        self.thread.guard(visitor)
        visitor.step()

    def _goes(self, visitor: _Visitor) -> None:
        """It is no visitor any more; there is room for another."""
        self._visitors.discard(visitor)
        self.thread.unguard(visitor)
        self.thread.unwatch(visitor.sock)
        self._look()

    def leaves(self, visitor: _Visitor, reason: str) -> None:
        """Send it away."""
        self._goes(visitor)
        with contextlib.suppress(OSError):
            visitor.sock.send(bulk.REFUSED)
        visitor.sock.close()
        self._count(visitor.address, reason)

    def _count(self, address: str, reason: str) -> None:
        self.refused += 1
        log.debug("bulk connection from %s refused: %s", address, reason)
        self._on_refused("bulk", ProtocolError(f"bulk connection from {address} refused: {reason}"))

    def shows(self, visitor: _Visitor, preamble: bytearray) -> None:
        """Look at what it brought, and hand its socket on."""
        try:
            take = self._tokens.redeem(bulk.read_preamble(preamble), now_s=time.monotonic())
        except ProtocolError as error:
            self.leaves(visitor, str(error))
            return
        if take is None:
            self.leaves(visitor, "its token is wrong, was used before or came late")
            return
        self._goes(visitor)
        try:
            visitor.sock.send(bulk.ACCEPTED)
        except OSError as error:
            visitor.sock.close()
            self._count(visitor.address, str(error))
            return
        take(visitor.sock)


class TcpOffer:
    """Offers lane tcp on a free port of one interface; see attachments.LaneOffer.

    host: of the ps's own address. server_context: for both directions, where the cluster has TLS. timeout_s: how long
    a token is good for, and how long a transfer may make no progress (a third of --timeout). take: memory for what
    comes in. on_refused: told of every connection that was sent away, on the receive thread.
    Raises UsageError where the interface can't be listened on.
    """

    lane = "tcp"

    def __init__(
        self,
        host: str,
        server_context: ssl.SSLContext | None = None,
        *,
        timeout_s: float,
        take: Callable[[int], memoryview],
        on_refused: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        listener = _listen(host)
        self.port: int = listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._take = take
        self._tokens: Tokens[Take] = Tokens(timeout_s)
        self._receiver = SocketThread("bulk-receive")
        self._sender = SocketThread("bulk-send")
        self._door = Door(listener, self._receiver, self._tokens, server_context, on_refused)
        self._closed = False
        self._door.open()

    @property
    def refused(self) -> int:
        """Connections sent away: strangers, wrong, used and late tokens."""
        return self._door.refused

    @property
    def visitors(self) -> int:
        """Connections that have not shown a token yet."""
        return self._door.visitors

    def open(self, holder: Holder, shard: Shard, loop: asyncio.AbstractEventLoop) -> Opening:
        """An attachment without sockets, and the tokens that bring them."""
        attachment = TcpAttachment(
            holder,
            loop,
            receiver=self._receiver,
            sender=self._sender,
            limit_s=self._timeout_s,
            take=self._take,
            forget=lambda: self._revoke(up, down),
        )
        now_s = time.monotonic()
        up = self._tokens.grant(attachment.incoming.attach, now_s=now_s)
        down = self._tokens.grant(attachment.outgoing.attach, now_s=now_s)
        return Opening(attachment=attachment, port=self.port, up_token=up, down_token=down)

    def _revoke(self, *tokens: bytes) -> None:
        for token in tokens:
            self._tokens.revoke(token)

    def close(self) -> None:
        """Take no more sockets and end both threads; attachments are closed before. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._door.close()
        self._receiver.close()
        self._sender.close()


def _listen(host: str) -> socket.socket:
    name = host.strip("[]")
    try:
        if name in _WILDCARDS:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=MAX_VISITORS)
        else:
            family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address[:2], family=family, backlog=MAX_VISITORS)
    except OSError as error:
        raise UsageError(
            f"can't listen for bulk sockets on {host} ({error}); does it belong to this machine?"
        ) from error
    listener.setblocking(False)
    return listener
