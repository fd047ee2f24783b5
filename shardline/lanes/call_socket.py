"""The worker's half of a socket that carries calls: see call_frames. Calls over it skip gRPC and its threads."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import grpc

from shardline.errors import ProtocolError
from shardline.lanes.call_frames import (
    MAX_REPLY_BYTES,
    CallError,
    CallFrameReader,
    Frame,
    Kind,
    frame,
    read_failure,
)
from shardline.lanes.socket_thread import NOT_READY, shut
from shardline.lanes.tls_socket import TlsSocket
from shardline.wire.protobuf import ReplyView, Request, read_reply, write_request

RECEIVE_BYTES = 64 << 10
Item = TypeVar("Item")


class Talk(Protocol):
    """What a call needs of its caller."""

    def began(self, call: CallSocket) -> None:
        """The call can be cancelled from now on."""
        ...

    def sending(self, requests: Iterable[Item]) -> Iterator[Item]:
        """The requests; keeps the error that ends them and cancels the call."""
        ...

    def follow(self, requests: Iterator[Item]) -> None:
        """Do what comes after the only request."""
        ...

    def over(self, call: CallSocket) -> None:
        """The call has ended."""
        ...


class CallSocket:
    """Calls to one shard, one at a time, over a connected socket. Any thread may call cancel()."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = CallFrameReader(MAX_REPLY_BYTES)
        self._frames: deque[Frame] = deque()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._arrival = None if isinstance(sock, TlsSocket) else select.poll()
        """Set where bytes that have arrived make the socket readable: what TLS has decrypted doesn't."""
        if self._arrival is not None:
            self._arrival.register(sock, select.POLLIN)
        # TLS keeps one state for both directions, and a call may send on one thread and receive on another.
        self._using = threading.Lock()
        self._cancelled = False

    def call(self, talk: Talk, requests: Iterable[Request], timeout_s: float, *, single: bool) -> Iterator[ReplyView]:
        """The replies to these requests. Raises CallError; then, or if not all are read, the socket is of no more use.

        single: there is one request, which this thread sends, and the bytes that follow it. Else another thread does.
        """
        deadline_s = time.monotonic() + timeout_s
        if single:
            left = iter(requests)
            request = write_request(next(left))
            talk.began(self)
            self._send(Kind.LAST, request, deadline_s)
            talk.follow(left)
        else:
            talk.began(self)
            threading.Thread(
                target=self._send_all, args=(talk, requests, deadline_s), name="calls", daemon=True
            ).start()
        try:
            yield from self._replies(deadline_s)
        finally:
            talk.over(self)

    def _send_all(self, talk: Talk, requests: Iterable[Request], deadline_s: float) -> None:
        try:
            # An error while a request is made or written is the caller's.
            for body in talk.sending(map(write_request, requests)):
                self._send(Kind.REQUEST, body, deadline_s)
            self._send(Kind.LAST, b"", deadline_s)
        except CallError:
            # What the shard sent before it broke is still to be read.
            shut(self._sock)

    def _send(self, kind: Kind, body: bytes, deadline_s: float) -> None:
        left = memoryview(frame(kind, body))
        while len(left):
            try:
                with self._using:
                    count = self._sock.send(left)
            except NOT_READY as blocked:
                self._await(blocked, select.POLLOUT, deadline_s)
            except OSError as error:
                raise self._broken(error) from error
            else:
                left = left[count:]

    def _replies(self, deadline_s: float) -> Iterator[ReplyView]:
        while True:
            while not self._frames:
                self._receive(deadline_s)
            kind, body = self._frames.popleft()
            if kind is Kind.REPLY:
                yield read_reply(body)
            elif kind is Kind.DONE:
                return
            elif kind is Kind.FAILED:
                raise read_failure(body)
            else:
                raise ProtocolError(f"the shard sent a frame of kind {kind.name} on a lane's socket")

    def _receive(self, deadline_s: float) -> None:
        if self._arrival is not None:
            # A reply is hardly ever there already.
            self._wait(self._arrival, deadline_s)
        try:
            with self._using:
                count = self._sock.recv_into(self._buffer)
        except NOT_READY as blocked:
            self._await(blocked, select.POLLIN, deadline_s)
            return
        except OSError as error:
            raise self._broken(error) from error
        if count == 0:
            raise self._broken(ConnectionError("the other side closed it"))
        self._frames.extend(self._reader.feed(self._buffer[:count]))

    def _await(self, blocked: BaseException, events: int, deadline_s: float) -> None:
        """Wait until the socket is ready. Raises CallError at the deadline."""
        if isinstance(blocked, ssl.SSLWantReadError):
            events = select.POLLIN
        elif isinstance(blocked, ssl.SSLWantWriteError):
            events = select.POLLOUT
        poll = select.poll()
        try:
            poll.register(self._sock, events)
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        self._wait(poll, deadline_s)

    @staticmethod
    def _wait(poll: select.poll, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(max(1.0, 1e3 * left_s)):
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed on a lane's socket")

    def _broken(self, error: Exception) -> CallError:
        if self._cancelled:
            return CallError(grpc.StatusCode.CANCELLED, "abandoned by this side")
        return CallError(grpc.StatusCode.UNAVAILABLE, f"the socket of its calls broke: {error or type(error).__name__}")

    @property
    def usable(self) -> bool:
        """Whether it was not cancelled: a call may have ended well in spite of that, but there is no other one."""
        return not self._cancelled

    def cancel(self) -> None:
        """End the running call, and with it the socket's use."""
        self._cancelled = True
        shut(self._sock)

    def close(self) -> None:
        """Free the socket. Called by the calling thread, or when no call runs."""
        self.cancel()
        with self._using:
            self._sock.close()
