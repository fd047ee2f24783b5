"""One worker's sockets: buckets in over one, published parameters out over another, calls over the third.

The bytes move on the native engine (lines.py), or, with TLS or without the native library, on two threads that all
workers share: one for each direction. Calls are served on the loop. An error of one
socket closes all: a raw byte stream can't be resumed in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from shardline.core.tensor_bytes import Buffer, tensor_from_bytes
from shardline.errors import ProtocolError, UnreachableError
from shardline.host.awake import awake_s
from shardline.host.loops import post
from shardline.lanes.attachments import Holder
from shardline.lanes.call_server import Answers, CallServer
from shardline.lanes.socket_thread import NOT_READY, READ, WRITE, SocketThread, shut
from shardline.lanes.tcp.frames import WHOLE
from shardline.lanes.tcp.lines import EngineReceive, EngineSend
from shardline.lanes.tls_socket import TlsSocket
from shardline.storage.writes import Intact

WINDOW = 8
"""Buckets of a push that may be incoming at once: enough to keep the socket busy while others are counted."""
QUEUED_BYTES = 4 << 20
"""Bytes that may be queued before send() blocks its caller."""
TURN_BYTES = 2 << 20
"""Bytes that one connection may move before the others get their turn."""
BATCH_BYTES = 512 << 10
"""Bytes that the kernel collects before it wakes the receive thread: few calls, yet within the processor's cache."""


class TcpTicket:
    """One incoming referred bucket; see attachments.Ticket."""

    def __init__(self, attachment: TcpAttachment, memory: memoryview, digest: int) -> None:
        self.memory = memory
        self.digest = digest
        self.matches: bool | None = None
        self.filled = 0
        self.whole = len(memory) == 0
        self._attachment = attachment

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived, or never will."""
        return self.whole or bool(self._attachment.failure)

    def tensor(self, dtype: str) -> torch.Tensor:
        return tensor_from_bytes(self.memory, dtype)

    async def wait(self) -> None:
        """Wait until all bytes have arrived. Raises UnreachableError if they won't come."""
        if not self.whole:
            await self._attachment.arrivals.until(lambda: self.done)
            if not self.whole:
                raise UnreachableError(self._attachment.failure)


@dataclass
class _Payload:
    """Outgoing bytes. marked: they have been sent, and only the WHOLE byte behind them is missing."""

    rest: memoryview
    size: int
    intact: Intact | None
    marked: bool = False


Item = TypeVar("Item")


class _Direction(Generic[Item]):
    """One socket of an attachment and its queue. Once attached, only its owner thread uses the socket."""

    def __init__(
        self, thread: SocketThread, limit_s: float, changed: Callable[[], None], broke: Callable[[str], None]
    ) -> None:
        self.moved_s = 0.0
        self.limit_s = limit_s
        self._thread = thread
        self._changed = changed
        self._broke = broke
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._failed = False
        self._queue: deque[Item] = deque()

    def attach(self, sock: socket.socket) -> None:
        """Set the worker's socket. On any thread; from now on it belongs to the owner thread."""
        with self._lock:
            welcome = not self._failed and self._sock is None
            if welcome:
                self._sock = sock
        if welcome:
            self._thread.post(self._move)
        else:
            sock.close()

    def stalled(self) -> None:
        """Break the attachment: there was no progress for too long."""
        state = "came" if self._sock is None else "moved"
        self._broke(f"nothing {state} for {self.limit_s:.0f} s")

    def fail(self) -> None:
        """Close the direction. From any thread; may be called twice."""
        with self._lock:
            self._queue.clear()
            if not self._failed:
                self._failed = True
                if self._sock is not None:
                    # Running calls return at once.
                    shut(self._sock)
                self._thread.post(self._free)

    def _append(self, item: Item) -> None:
        with self._lock:
            if self._failed:
                return
            self._queue.append(item)
            first = len(self._queue) == 1
        if first:
            self._thread.post(self._begin)

    def _first(self) -> Item | None:
        with self._lock:
            return self._queue[0] if self._queue else None

    def _moved(self) -> bool:
        """Remove the first item, which is done; False if the direction is closed."""
        with self._lock:
            if self._failed:
                return False
            self._queue.popleft()
        return True

    def _begin(self) -> None:
        """Start moving the queue's items."""
        self.moved_s = awake_s()
        if not self._failed:
            self._thread.guard(self)
            self._move()

    def _move(self) -> None:
        """Move what can be moved now. On the owner thread."""
        if self._sock is not None and not self._failed:
            self._transfer(self._sock, isinstance(self._sock, TlsSocket))

    def _transfer(self, sock: socket.socket, secure: bool) -> None:
        raise NotImplementedError

    def _rest(self, sock: socket.socket) -> None:
        """Rest while the queue is empty."""
        self._thread.unwatch(sock)
        self._thread.unguard(self)

    def _free(self) -> None:
        self._thread.unguard(self)
        if self._sock is not None:
            self._thread.unwatch(self._sock)
            self._sock.close()


class ReceiveSocket(_Direction[TcpTicket]):
    """The socket on which pushed buckets arrive, read only while some are expected: this limits the sender."""

    def __init__(
        self, thread: SocketThread, limit_s: float, changed: Callable[[], None], broke: Callable[[str], None]
    ) -> None:
        super().__init__(thread, limit_s, changed, broke)
        self._batch = 1

    def expect(self, ticket: TcpTicket) -> None:
        self._append(ticket)

    def _transfer(self, sock: socket.socket, secure: bool) -> None:
        budget = TURN_BYTES
        while True:
            ticket = self._first()
            if ticket is None:
                self._thread.unguard(self)
                if budget == TURN_BYTES:
                    # More has arrived than is expected. Otherwise the socket stays watched: the next bucket is near.
                    self._thread.unwatch(sock)
                return
            try:
                count = sock.recv_into(ticket.memory[ticket.filled :][:TURN_BYTES])
            except NOT_READY:
                break
            except OSError as error:
                self._broke(f"receiving failed: {error}")
                return
            if count == 0:
                self._broke("the worker closed its socket in the middle of a transfer")
                return
            self._took(ticket, count)
            budget -= count
            if secure:
                if budget <= 0:
                    # Bytes that have arrived at TLS don't make the socket readable.
                    if sock.pending():  # type: ignore[attr-defined]
                        self._thread.post(self._move)
                    break
            elif budget <= 0 or not ticket.whole:
                break
        if not secure:
            self._gather(sock)
        self._thread.watch(sock, READ, self._move)

    def _took(self, ticket: TcpTicket, count: int) -> None:
        self.moved_s = awake_s()
        ticket.filled += count
        if ticket.filled < len(ticket.memory):
            return
        if self._moved():
            ticket.whole = True
            self._changed()

    def _gather(self, sock: socket.socket) -> None:
        """Have the kernel wake the thread for a batch of bytes, or for the end of a bucket.

        Never for more than is sure to come: then it would not wake the thread at all.
        """
        ticket = self._first()
        batch = min(BATCH_BYTES, len(ticket.memory) - ticket.filled) if ticket is not None else 1
        if batch != self._batch:
            self._batch = batch
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, batch)


class SendSocket(_Direction[_Payload]):
    """The socket on which pulled buckets leave."""

    @property
    def queued_bytes(self) -> int:
        with self._lock:
            return sum(item.size for item in self._queue)

    def put(self, payload: memoryview, intact: Intact | None) -> None:
        self._append(_Payload(payload, len(payload), intact))

    def _transfer(self, sock: socket.socket, secure: bool) -> None:
        budget = TURN_BYTES
        while budget > 0:
            item = self._first()
            if item is None:
                self._rest(sock)
                return
            try:
                count = sock.send(item.rest[:TURN_BYTES])
            except NOT_READY:
                break
            except OSError as error:
                self._broke(f"sending failed: {error}")
                return
            self.moved_s = awake_s()
            budget -= count
            item.rest = item.rest[count:]
            if len(item.rest) == 0:
                if not self._left(item):
                    return
            elif not secure:
                # The kernel has no more room.
                break
        self._thread.watch(sock, WRITE, self._move)

    def _left(self, item: _Payload) -> bool:
        """After an item's bytes: mark them as whole, or take the next item. False = they were overwritten meanwhile."""
        if not item.marked:
            if item.intact is not None and not item.intact():
                self._broke("parameters were overwritten while they were being sent")
                return False
            item.marked = True
            item.rest = memoryview(WHOLE)
            return True
        if not self._moved():
            return False
        self._changed()
        return True


Ends = tuple[ReceiveSocket, SendSocket] | tuple[EngineReceive, EngineSend]
"""Those of an attachment's bytes: on threads of Python's, or on the engine."""


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


MakeEnds = Callable[[asyncio.AbstractEventLoop, Changes, Changes, Callable[[str], None]], Ends]


class TcpAttachment:
    """One open tcp lane; see attachments.Attachment.

    ends: makes both ends of the bytes, given the loop, whom to tell when a bucket has come and when one has left, and
    what to call with the reason when an end broke.
    answers: serves the calls. take: memory for an incoming bucket. forget: called once when the attachment can't be
    used any more.
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
        ends: MakeEnds,
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
        self.incoming: ReceiveSocket | EngineReceive
        self.outgoing: SendSocket | EngineSend
        self.incoming, self.outgoing = ends(loop, self.arrivals, self._room, self._fail)
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
        """Queue bytes; returns when the queue is short enough. Raises UnreachableError if the sockets broke."""
        self._check()
        view = memoryview(payload)
        if view.nbytes == 0:
            return
        self.outgoing.put(view.cast("B"), intact)
        if self.outgoing.queued_bytes > QUEUED_BYTES:
            await self._room.until(lambda: bool(self.failure) or self.outgoing.queued_bytes <= QUEUED_BYTES)
            self._check()

    def abort(self, reason: str) -> None:
        """Close both sockets: bytes in flight have no meaning any more."""
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
