"""Messages between a worker and its loaders, over a socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from shardline.loading.packed import PackedBatch
from shardline.loading.upcoming import Place

_REQUEST = struct.Struct("<qqqq")
_REPLY = struct.Struct("<qqb")
FORGET = (-1, 0, 0)
"""In place of a batch: all earlier requests that are not answered yet are to be answered with a Skipped."""
_BATCH, _ERROR, _SKIPPED = range(3)


class HungUp(Exception):
    """The other process has ended, or is about to."""


@dataclass(frozen=True)
class Request:
    """number: counts this loader's requests."""

    number: int
    place: Place


@dataclass(frozen=True)
class Failed:
    """Reading a batch raised this; pickled."""

    error: bytes


@dataclass(frozen=True)
class Skipped:
    """The batch was not read, as asked."""


Answer = PackedBatch | Failed | Skipped


def send_request(sock: socket.socket, request: Request) -> None:
    """Raises HungUp."""
    _ending(lambda: sock.sendall(_REQUEST.pack(request.number, *request.place)))


def receive_request(sock: socket.socket, *, wait: bool) -> Request | None:
    """The next request; None if there is none yet and wait is False. Raises HungUp."""
    try:
        data = sock.recv(_REQUEST.size, 0 if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError as error:
        raise HungUp from error
    number, step, replica, microbatch = _REQUEST.unpack(data + _exactly(sock, _REQUEST.size - len(data), begun=data))
    return Request(number, (step, replica, microbatch))


def send_answer(sock: socket.socket, number: int, answer: Answer) -> None:
    """Answer a request. Raises HungUp."""
    kind, data, fds = _SKIPPED, b"", list[int]()
    if isinstance(answer, PackedBatch):
        kind, data, fds = _BATCH, answer.head, [answer.memory] if answer.memory >= 0 else []
    elif isinstance(answer, Failed):
        kind, data = _ERROR, answer.error
    head = _REPLY.pack(number, len(data), kind)

    def send() -> None:
        # A descriptor arrives with the first of the bytes that it was sent with.
        sent = socket.send_fds(sock, [head], fds)
        sock.sendall(head[sent:] + data)

    _ending(send)


def receive_answer(sock: socket.socket) -> tuple[int, Answer]:
    """The number of a request, and its answer; waits for all of it. Raises HungUp."""
    try:
        head, fds, _, _ = socket.recv_fds(sock, _REPLY.size, 1)
    except OSError as error:
        raise HungUp from error
    packed = PackedBatch(b"", fds[0] if fds else -1)
    try:
        number, length, kind = _REPLY.unpack(head + _exactly(sock, _REPLY.size - len(head), begun=head))
        data = _exactly(sock, length, begun=head)
    except BaseException:
        packed.close()
        raise
    if kind == _BATCH:
        packed.head = data
        return number, packed
    return number, Failed(data) if kind == _ERROR else Skipped()


def _exactly(sock: socket.socket, count: int, *, begun: bytes) -> bytes:
    """The next bytes. begun: what came before them of the message; if that is nothing, the other side has ended."""
    if not begun:
        raise HungUp
    data = bytearray(count)
    with memoryview(data) as rest:
        got = 0
        while got < count:
            try:
                part = sock.recv_into(rest[got:])
            except OSError as error:
                raise HungUp from error
            if not part:
                raise HungUp
            got += part
    return bytes(data)


def _ending(send: Callable[[], None]) -> None:
    try:
        send()
    except OSError as error:
        raise HungUp from error
