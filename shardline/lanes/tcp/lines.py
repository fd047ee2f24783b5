"""The bulk sockets of an attachment on the native engine. Used on the server's loop, unless a method says otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable

from shardline.lanes.tcp.frames import WHOLE
from shardline.lanes.tls_socket import TlsSocket, shut
from shardline.native import engine
from shardline.native.engine import Engine
from shardline.storage.bucket import Intact


class Posted:
    """Memory that the engine receives into, or sends while it is intact. digest: of what is to come; 0 = unknown."""

    def __init__(self, memory: memoryview, digest: int = 0, intact: Intact | None = None) -> None:
        self.memory = memory
        self.digest = digest
        self.intact = intact
        self.whole = len(memory) == 0
        self.matches: bool | None = None
        """True if what came has the digest; None if that is unknown."""


class _EngineLine:
    """One socket and what is posted on it; what is posted before the socket comes waits for it."""

    mark = b""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        limit_s: float,
        changed: Callable[[], None],
        broke: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._limit_s = limit_s
        self._changed = changed
        self._broke = broke
        self._lock = threading.Lock()
        self._failed = False
        self._line = 0
        self._item = 0
        self._posts: dict[int, Posted] = {}
        """By item, in order: the engine uses their memory until it reports them."""
        self._overdue: asyncio.TimerHandle | None = None
        """While something waits for the socket."""

    def attach(self, sock: socket.socket) -> None:
        """Set the worker's socket. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self._attach, sock)
        except RuntimeError:
            # The loop is closed: the server has ended.
            sock.close()

    def _attach(self, sock: socket.socket) -> None:
        with self._lock:
            if self._failed or self._line:
                shut(sock)
                sock.close()
                return
            try:
                tls = sock.native if isinstance(sock, TlsSocket) else None
                self._line = self._engine.open(
                    sock, self._loop, self._report, tls=tls, mark=self.mark, limit_s=self._limit_s
                )
            except OSError as error:
                problem = str(error)
            else:
                problem = ""
        if problem:
            sock.close()
            self._broke(problem)
            return
        if self._overdue is not None:
            self._overdue.cancel()
        for item, post in list(self._posts.items()):
            self._hand_over(item, post)

    def _never_came(self) -> None:
        if not self._line:
            self._broke(f"nothing came for {self._limit_s:.0f} s")

    def _add(self, post: Posted) -> None:
        if self._failed:
            return
        self._item += 1
        self._posts[self._item] = post
        if self._line:
            self._hand_over(self._item, post)
        elif self._overdue is None:
            self._overdue = self._loop.call_later(self._limit_s, self._never_came)

    def _hand_over(self, item: int, post: Posted) -> None:
        """Posted one item. On a dead line nothing happens: what ended it is reported."""
        guard, count = (None, 0) if post.intact is None else (post.intact.address, post.intact.count)
        answer = self._engine.post(self._line, item, post.memory, digest=post.digest, guard=guard, value=count)
        if answer == engine.DONE_NOW:
            self._done(item, engine.DONE)
        elif answer == engine.DIGEST_NOW:
            self._done(item, engine.DIGEST)

    def _report(self, item: int, status: int) -> None:
        if item == engine.LINE:
            self._broke(self._problem(status))
        else:
            self._done(item, status)

    def _done(self, item: int, status: int) -> None:
        post = self._posts.pop(item, None)
        if post is not None:
            self._moved(post, status)
            self._changed()

    def _problem(self, status: int) -> str:
        if status == engine.STALLED:
            return f"nothing moved for {self._limit_s:.0f} s"
        if status == engine.CLOSED:
            return "the worker closed its socket in the middle of a transfer"
        if status == engine.CHANGED:
            return "parameters were overwritten while they were being sent"
        return f"{'sending' if self.mark else 'receiving'} failed: {OSError(status, os.strerror(status))}"

    def _moved(self, post: Posted, status: int) -> None:
        """One item was moved whole."""

    def fail(self) -> None:
        """Close the socket. From any thread; may be called twice."""
        with self._lock:
            again, self._failed = self._failed, True
            line, self._line = self._line, 0
        if again:
            # The first call may still be waiting for the engine to let go of the memory.
            return
        if line:
            self._engine.close_line(line)
        self._posts.clear()
        if self._overdue is not None:
            # A closed loop runs no timers.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._overdue.cancel)


class EngineReceive(_EngineLine):
    """The socket on which pushed buckets arrive, read only while some are expected: this limits the sender."""

    def expect(self, post: Posted) -> None:
        self._add(post)

    def _moved(self, post: Posted, status: int) -> None:
        if post.digest:
            post.matches = status != engine.DIGEST
        post.whole = True


class EngineSend(_EngineLine):
    """The socket on which pulled buckets leave."""

    mark = WHOLE
    queued_bytes = 0
    """Bytes queued or being sent."""

    def put(self, payload: memoryview, intact: Intact | None) -> None:
        self.queued_bytes += len(payload)
        self._add(Posted(payload, intact=intact))

    def _moved(self, post: Posted, status: int) -> None:
        self.queued_bytes -= len(post.memory)

    def fail(self) -> None:
        super().fail()
        self.queued_bytes = 0
