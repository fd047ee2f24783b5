"""One worker's sockets: buckets in over one, published parameters out over another, calls over the third.

The bytes move on the native engine (lines.py), calls are served on the loop. An error of one socket closes all: a raw
byte stream can't be resumed in the middle.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import torch

from shardline.core.tensor_bytes import Buffer, tensor_from_bytes
from shardline.errors import ProtocolError, UnreachableError
from shardline.host.loops import post
from shardline.lanes.attachments import Holder
from shardline.lanes.call_server import Answers, CallServer
from shardline.lanes.tcp.lines import EngineReceive, EngineSend, Posted
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
