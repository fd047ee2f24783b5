"""The worker's half of a socket that carries calls: see call_frames. Calls over it skip gRPC and its threads."""

from __future__ import annotations

import os
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
from shardline.host.process import usable_cores
from shardline.lanes.call_frames import (
    MAX_REPLY_BYTES,
    CallError,
    CallFrameReader,
    Frame,
    Kind,
    frame,
    read_failure,
)
from shardline.lanes.tls_socket import NOT_READY, TlsSocket, shut
from shardline.rpc.messages.data import parse
from shardline.rpc.v1 import data_pb2

RECEIVE_BYTES = 64 << 10
LOOK_S = 300e-6
"""Seconds for which a thread looks for an answer at most, and in which the one before has to have come."""
AWAY_S = 50e-6
"""Another process had the core if so much time is between two looks."""
ASLEEP = 500
"""Number of answers that are waited for asleep then."""
_looking = threading.Lock()
"""Held by the one thread of this process that looks."""
Item = TypeVar("Item")
Message = data_pb2.PushPullRequest
Reply = data_pb2.PushPullReply


class Talk(Protocol):
    """What a call needs of its caller."""

    def began(self, call: CallSocket) -> None:
        """The call can be cancelled from now on."""

    def sending(self, requests: Iterable[Item]) -> Iterator[Item]:
        """The requests; keeps the error that ends them and cancels the call."""

    def follow(self, requests: Iterator[Item]) -> None:
        """Do what comes after the only request."""

    def over(self, call: CallSocket) -> None: ...


class Lookout:
    """Waits for a socket's answers, one after another, on one thread at a time. poll: to wait for one asleep.

    A thread that falls asleep and is woken loses a fifth of a small step. So after an answer that came within LOOK_S it
    looks, for so long at most, whether the next one is there, and offers the core to others between two looks. If one
    takes it, the core is wanted, and the next answers are waited for asleep.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        # On one core, who looks is in the way of what it looks for.
        self._several = usable_cores() > 1
        self._quick = False
        """The last answer came within LOOK_S, and nobody else wants the core."""
        self._asleep = 0

    def found(self, began_s: float) -> bool:
        """Look for the answer that is awaited from now on, if that pays; False: wait for it asleep."""
        return self._quick and self.look(began_s)

    def came(self, began_s: float) -> None:
        """Note that the answer has come, whoever has waited for it."""
        self._asleep -= self._asleep > 0
        self._quick = self._several and not self._asleep and time.monotonic() - began_s < LOOK_S

    def look(self, began_s: float) -> bool:
        """Whether the answer came in time. False at once if another thread looks."""
        if not _looking.acquire(blocking=False):
            return False
        try:
            last_s = began_s
            while not self.poll.poll(0):
                os.sched_yield()
                now_s = time.monotonic()
                if now_s - last_s > AWAY_S:
                    self._asleep = ASLEEP
                    return False
                if now_s - began_s > LOOK_S:
                    return False
                last_s = now_s
            return True
        finally:
            _looking.release()


class CallSocket:
    """Calls to one shard, one at a time, over a connected socket. Any thread may call cancel()."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = CallFrameReader(MAX_REPLY_BYTES)
        self._frames: deque[Frame] = deque()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._lookout = None if isinstance(sock, TlsSocket) else Lookout(sock)
        """Set where bytes that have arrived make the socket readable: what TLS has decrypted doesn't."""
        # TLS keeps one state for both directions, and a call may send on one thread and receive on another.
        self._using = threading.Lock()
        self._cancelled = False

    def call(self, talk: Talk, requests: Iterable[Message], timeout_s: float, *, single: bool) -> Iterator[Reply]:
        """The replies to these requests. Raises CallError; then, or if not all are read, the socket is of no more use.

        single: there is one request, which this thread sends, and the bytes that follow it. Else another thread does.
        """
        deadline_s = time.monotonic() + timeout_s
        if single:
            left = iter(requests)
            request = next(left).SerializeToString()
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

    def _send_all(self, talk: Talk, requests: Iterable[Message], deadline_s: float) -> None:
        try:
            # An error while a request is made or written is the caller's.
            for body in talk.sending(request.SerializeToString() for request in requests):
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

    def _replies(self, deadline_s: float) -> Iterator[Reply]:
        while True:
            while not self._frames:
                self._receive(deadline_s)
            kind, body = self._frames.popleft()
            if kind is Kind.REPLY:
                yield parse(data_pb2.PushPullReply, body)
            elif kind is Kind.DONE:
                return
            elif kind is Kind.FAILED:
                raise read_failure(body)
            else:
                raise ProtocolError(f"the shard sent a frame of kind {kind.name} on a lane's socket")

    def _receive(self, deadline_s: float) -> None:
        if self._lookout is not None:
            # A reply is hardly ever there already.
            began_s = time.monotonic()
            if not self._lookout.found(began_s):
                self._wait(self._lookout.poll, deadline_s)
            self._lookout.came(began_s)
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
