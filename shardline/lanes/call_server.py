"""The server's half of a socket that carries calls: see call_frames. Each call runs the handler of the gRPC call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, Protocol

from shardline.errors import ProtocolError
from shardline.lanes.call_frames import MAX_REQUEST_BYTES, CallFrameReader, Kind, failure, frame
from shardline.lanes.tls_socket import NOT_READY, TlsSocket
from shardline.rpc.errors import drop_frames, status_of
from shardline.rpc.messages.data import parse
from shardline.rpc.v1 import data_pb2

log = logging.getLogger("shardline.lanes")
RECEIVE_BYTES = 64 << 10
MAX_REQUESTS = 32
HELD_REQUEST_BYTES = 1 << 20
"""Requests of a call, and their bytes, that may wait for the handler; beyond, the socket is not read."""
LAST_WORD_S = 1.0
"""Seconds in which a call may end once its socket is to be closed."""
QUEUED_BYTES = 256 << 10
"""Bytes of replies that may wait to be sent before a reply blocks its call."""
_DONE = frame(Kind.DONE)


class ReplyWriter(Protocol):
    """Where a handler writes its replies; the part of gRPC's context that PushPull uses."""

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """Nothing: there is no metadata."""

    async def write(self, message: data_pb2.PushPullReply) -> None:
        """Send one reply; waits while the caller takes none."""


class Answered(NamedTuple):
    """A call that was answered at once: its replies so far, and what writes the others; None = these are all."""

    replies: list[data_pb2.PushPullReply]
    rest: Callable[[ReplyWriter], Awaitable[None]] | None


class Answers(Protocol):
    """The handlers of calls. An error that one raises ends its call."""

    async def answer(self, request: AsyncIterator[data_pb2.PushPullRequest], writer: ReplyWriter) -> None:
        """Take the requests of a call and write its replies."""

    def answer_at_once(self, request: data_pb2.PushPullRequest) -> Answered | None:
        """Answer a call that is one request, without waiting; None = nothing was done, it needs answer()."""


class _Call:
    def __init__(self, server: CallServer) -> None:
        self._server = server
        self._requests: deque[tuple[data_pb2.PushPullRequest, int]] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self.last = False
        """The caller has sent its last request."""

    @property
    def full(self) -> bool:
        """Whether no more requests should be read for now."""
        return len(self._requests) >= MAX_REQUESTS or self._bytes >= HELD_REQUEST_BYTES

    @property
    def waiting(self) -> int:
        """Number of requests that the handler has not taken."""
        return len(self._requests)

    def put(self, request: data_pb2.PushPullRequest | None, nbytes: int, *, last: bool) -> None:
        if request is not None:
            self._requests.append((request, nbytes))
            self._bytes += nbytes
        self.last = last
        self._more.set()

    def __aiter__(self) -> AsyncIterator[data_pb2.PushPullRequest]:
        return self

    async def __anext__(self) -> data_pb2.PushPullRequest:
        while not self._requests:
            if self.last:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        request, nbytes = self._requests.popleft()
        self._bytes -= nbytes
        self._server.read_on()
        return request


class CallServer:
    """Serves the calls of one worker over one socket, one after another. Used on the server's loop.

    broke: called once with the reason when the socket can't be used any more.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answers: Answers, *, who: str, broke: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._answers = answers
        self._who = who
        self._broke = broke
        self._sock: socket.socket | None = None
        self._secure = False
        self._closing = self._closed = False
        self._reader = CallFrameReader(MAX_REQUEST_BYTES)
        self._call: _Call | None = None
        self._task: asyncio.Task[None] | None = None
        self._skipping = False
        """The rest of a call that has ended is not for anyone."""
        self._reading = self._writing = False
        self._out = bytearray()
        self._room = asyncio.Event()
        self._room.set()

    def attach(self, sock: socket.socket) -> None:
        """Set the worker's socket, non-blocking. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._begin, sock)
        except RuntimeError:
            # The loop has ended.
            sock.close()

    def close(self) -> None:
        """Free the socket once its call has ended and been answered, or soon. From any thread; may be called twice."""
        # A closed loop has freed everything.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_soon)

    def _end_soon(self) -> None:
        self._closing = True
        if self._call is None:
            self._end()
        else:
            self._loop.call_later(LAST_WORD_S, self._end)

    def _begin(self, sock: socket.socket) -> None:
        if self._closing or self._sock is not None:
            sock.close()
            return
        self._sock, self._secure = sock, isinstance(sock, TlsSocket)
        self.read_on()
        # TLS may have decrypted the first bytes with the handshake's last.
        self._readable()

    def _end(self) -> None:
        self._closing = self._closed = True
        # The attachment and this refer to each other; its memory is not to wait for a garbage collection.
        self._broke = lambda reason: None
        if self._task is not None:
            self._task.cancel()
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._stop_reading(sock)
        if self._writing:
            self._loop.remove_writer(sock.fileno())
            self._writing = False
        sock.close()

    def _fail(self, reason: str) -> None:
        if not self._closed:
            broke = self._broke
            self._end()
            broke(reason)

    # Requests

    def read_on(self) -> None:
        """Read the socket unless its call has requests enough, or the worker has replies enough to read."""
        if self._sock is None:
            return
        if self._full:
            self._stop_reading(self._sock)
            return
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._readable)
            if self._secure and _pending(self._sock):
                self._loop.call_soon(self._readable)

    @property
    def _full(self) -> bool:
        """Whether no more should be read for now."""
        return self._call.full if self._call is not None else len(self._out) > QUEUED_BYTES

    def _stop_reading(self, sock: socket.socket) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(sock.fileno())

    def _readable(self) -> None:
        sock = self._sock
        if sock is None:
            return
        if self._full:
            self._stop_reading(sock)
            return
        try:
            while True:
                data = sock.recv(RECEIVE_BYTES)
                if not data:
                    self._fail("the worker closed the socket of its calls")
                    return
                for kind, body in self._reader.feed(data):
                    self._take(kind, body)
                    if self._sock is None:
                        return
                if not self._secure or self._full or not _pending(sock):
                    break
        except NOT_READY:
            pass
        except (OSError, ProtocolError) as error:
            self._fail(f"receiving calls failed: {error}")
            return
        self.read_on()

    def _take(self, kind: Kind, body: bytes) -> None:
        if kind not in (Kind.REQUEST, Kind.LAST):
            raise ProtocolError(f"a frame of kind {kind.name} from a worker")
        if self._skipping:
            self._skipping = kind is not Kind.LAST
            return
        last = kind is Kind.LAST
        request = parse(data_pb2.PushPullRequest, body) if body or not last else None
        if self._call is None:
            if request is not None and last and self._answer_at_once(request):
                return
            self._call = _Call(self)
            self._task = self._loop.create_task(self._serve(functools.partial(self._answers.answer, self._call, self)))
        elif self._call.last:
            raise ProtocolError("a call began before the previous one ended")
        self._call.put(request, len(body), last=last)

    # A call

    def _answer_at_once(self, request: data_pb2.PushPullRequest) -> bool:
        """Answer a call that is one request, if it is one that need not wait; its replies are sent together."""
        try:
            answered = self._answers.answer_at_once(request)
        except Exception as error:
            self._finish(self._failure(error))
            return True
        if answered is None:
            return False
        for reply in answered.replies:
            self._out += frame(Kind.REPLY, reply.SerializeToString())
        if answered.rest is None:
            self._finish(_DONE)
            return True
        self._flush()
        self._call = _Call(self)
        self._call.put(None, 0, last=True)
        self._task = self._loop.create_task(self._serve(functools.partial(answered.rest, self)))
        return True

    def _failure(self, error: Exception) -> bytes:
        code, sentence = status_of(error, self._who)
        drop_frames(error)
        return failure(code, sentence)

    async def _serve(self, answer: Callable[[], Awaitable[None]]) -> None:
        try:
            await answer()
        except asyncio.CancelledError:
            # The socket is closed, or the server ends. Raised again, the error would keep this frame, and so the call.
            self._call = self._task = None
            self._end()
        except Exception as error:
            self._finish(self._failure(error))
        else:
            self._finish(_DONE)

    def _finish(self, last: bytes) -> None:
        call, self._call, self._task = self._call, None, None
        self._out += last
        self._flush()
        if self._closing:
            self._end()
            return
        self._skipping = call is not None and not call.last
        if not self._reading:
            self.read_on()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None: ...

    async def write(self, message: data_pb2.PushPullReply) -> None:
        """Add a reply; waits while too much is unsent."""
        await self._room.wait()
        if not self._out:
            # Together with what follows at once, such as the end of the call.
            self._loop.call_soon(self._flush)
        self._out += frame(Kind.REPLY, message.SerializeToString())
        if len(self._out) > QUEUED_BYTES:
            self._flush()

    def _flush(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            while self._out:
                count = sock.send(self._out)
                del self._out[:count]
        except NOT_READY:
            pass
        except OSError as error:
            self._fail(f"sending replies failed: {error}")
            return
        (self._room.clear if len(self._out) > QUEUED_BYTES else self._room.set)()
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            if self._writing:
                self._loop.add_writer(sock.fileno(), self._flush)
            else:
                self._loop.remove_writer(sock.fileno())
                self.read_on()


def _pending(sock: socket.socket) -> bool:
    """Whether there may be more to read from TLS although the socket is not readable: bytes that have arrived there."""
    return bool(sock.pending())  # type: ignore[attr-defined]  # of TlsSocket
