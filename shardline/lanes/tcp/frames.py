"""Bulk sockets: raw payloads in one direction, in the order in which calls refer to them. Helpers of both sides.

A socket begins with a preamble (magic, version, one-time token) and the server's one-byte answer. After that it carries
payloads without frames, since their sizes are in the calls. On the way down each payload is followed by the byte WHOLE
once the server knows that nothing overwrote it while it was sent.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Sequence

from shardline.errors import ProtocolError
from shardline.host.process import kept_from_children
from shardline.lanes.tls_socket import TlsSocket
from shardline.lanes.token_acceptor import TOKEN_BYTES

VERSION = 1
_MAGIC = b"SHLB"
_PREAMBLE = struct.Struct(f"!4sB{TOKEN_BYTES}s")
PREAMBLE_BYTES = _PREAMBLE.size
ACCEPTED = b"+"
REFUSED = b"-"
WHOLE = b"."

UNSENT_BYTES = 256 << 10
"""Maximum bytes that the kernel keeps unsent: more would only delay later, more urgent bytes."""
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else None)


class RefusedError(OSError):
    """The server refused the preamble, or its answer is unknown."""


def preamble(token: bytes) -> bytes:
    return _PREAMBLE.pack(_MAGIC, VERSION, token)


def read_preamble(data: bytes | bytearray) -> bytes:
    """The token in a preamble. Raises ProtocolError for other bytes, or another version."""
    magic, version, token = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("the first bytes are not the preamble of a bulk socket")
    if version != VERSION:
        raise ProtocolError(f"the bulk socket has version {version}; this side has {VERSION}")
    return bytes(token)


def tune(sock: socket.socket) -> None:
    """Tune a connected socket: send at once, keep little unsent, don't pace traffic within the host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _TCP_NOTSENT_LOWAT is not None:
        # A kernel without it only keeps more bytes unsent.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if sys.platform == "linux" and sock.getsockname()[0] == sock.getpeername()[0]:
        # If bbr is the default it paces even loopback, which costs speed and CPU time for nothing.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def keep_alive(sock: socket.socket, silence_s: float) -> None:
    """Break a socket whose other host has not answered for 2 * silence_s seconds, as gRPC's keepalive does."""
    seconds = max(1, round(silence_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", max(1, seconds // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 2000 * seconds),
    ):
        # A system without one waits for the deadline of the call.
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def dial(
    host: str,
    port: int,
    token: bytes,
    *,
    timeout_s: float,
    stall_s: float,
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    hold: Callable[[socket.socket], None] = lambda sock: None,
) -> socket.socket:
    """Open a bulk socket that the server has accepted, for send_all() or receive().

    timeout_s: for connecting, and again for the handshake. stall_s: seconds that a later send or receive may take
    without progress. hold: called with every socket before it connects, so that another thread can shut() it.
    Raises RefusedError if the token was refused, OSError if nobody answers.
    """
    errors: list[OSError] = []
    context = tls()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = kept_from_children(socket.socket(family, kind, protocol))
        try:
            if context is not None:
                # Before connecting: wrapping moves the descriptor to another object.
                sock = TlsSocket(sock, context, name=host)
            hold(sock)
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            errors.append(error)
            continue
        try:
            tune(sock)
            if isinstance(sock, TlsSocket):
                sock.do_handshake()
            show_token(sock, token)
            be_patient(sock, stall_s)
        except BaseException:
            sock.close()
            raise
        return sock
    raise errors[0] if errors else OSError(f"{host} has no address")


def show_token(sock: socket.socket, token: bytes) -> None:
    """Send the preamble and wait for its answer. Raises RefusedError, OSError."""
    sock.sendall(preamble(token))
    answer = sock.recv(1)
    if answer != ACCEPTED:
        raise RefusedError(
            "the token was refused" if answer == REFUSED else "the server closed the socket instead of answering"
        )


def be_patient(sock: socket.socket, stall_s: float) -> None:
    """Make later calls wait, and time out after stall_s seconds without progress."""
    if isinstance(sock, TlsSocket):
        sock.settimeout(stall_s)
        return
    # With the kernel's timeouts the socket stays blocking, so that one call moves a whole bucket.
    sock.settimeout(None)
    timeval = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def send_all(sock: socket.socket, data: memoryview) -> None:
    """Send all bytes. Raises TimeoutError after the socket's stall time without progress, OSError if it broke."""
    sent = 0
    while sent < len(data):
        try:
            sent += sock.send(data[sent:])
        except BlockingIOError:
            raise TimeoutError("the other side accepts no bytes") from None


def receive(sock: socket.socket, memory: memoryview) -> None:
    """Fill the memory, then read the WHOLE byte after it.

    Raises TimeoutError after the socket's stall time without progress, OSError if the socket broke.
    """
    mark = memoryview(bytearray(1))
    size, filled = len(memory), 0
    while filled <= size:
        rest = [memory[filled:], mark] if filled < size else [mark]
        try:
            count = _receive_some(sock, rest)
        except BlockingIOError:
            raise TimeoutError("the other side sends no bytes") from None
        if count == 0:
            raise ConnectionError("the other side closed it")
        filled += count
    if mark != WHOLE:
        raise ConnectionError("the bytes are out of step with the calls")


def _receive_some(sock: socket.socket, rest: Sequence[memoryview]) -> int:
    if isinstance(sock, TlsSocket):
        return sock.recv_into(rest[0])
    # SO_RCVLOWAT would save wake-ups here too, but after a partial read a blocking call then waits for too much.
    return sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
