"""A thread that owns many sockets: other threads post actions to it, and no socket needs its own thread."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shardline.host.awake import awake_s

log = logging.getLogger("shardline.ps")
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
NOT_READY = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a non-blocking socket raises that can't go on yet."""
TICK_S = 0.25
"""Seconds between two checks for stalled lines."""


class Line(Protocol):
    """Something that must make progress within a time limit."""

    moved_s: float
    """Time of the last progress, by awake_s()."""
    limit_s: float

    def stalled(self) -> None:
        """There was no progress for limit_s seconds. Called on the socket thread, repeatedly until unguarded."""


class SocketThread:
    """Runs posted actions, calls back for sockets that are ready, and notifies stalled lines.

    Other threads may only call post() and close(). Nothing wakes the thread while nobody waits for anything.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._acts: deque[Callable[[], None]] = deque()
        self._bell, self._listener = socket.socketpair()
        self._bell.setblocking(False)
        self._listener.setblocking(False)
        self._rung = False
        self._ended = False
        self._guarded: set[Line] = set()
        self._look_s = 0.0
        self._watched: dict[socket.socket, tuple[int, Callable[[], None]]] = {}
        """Sockets registered with the selector.

        Asking the selector is expensive: for an unknown socket it raises an error with its name, found by system calls.
        """
        self._selector.register(self._listener, READ, self._answer)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, act: Callable[[], None]) -> None:
        """Run an action on this thread soon. From any thread; does nothing after close()."""
        self._acts.append(act)
        if not self._rung:
            self._rung = True
            # Full: it was already signalled. Closed: nobody needs it any more.
            with contextlib.suppress(OSError):
                self._bell.send(b"!")

    def watch(self, sock: socket.socket, events: int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever the socket can be read or written."""
        wanted = events, ready
        watched = self._watched.get(sock)
        if watched is None:
            self._selector.register(sock, events, ready)
        elif watched != wanted:
            self._selector.modify(sock, events, ready)
        self._watched[sock] = wanted

    def unwatch(self, sock: socket.socket) -> None:
        """Stop calling back. May be called twice; call it before the socket is closed."""
        if self._watched.pop(sock, None) is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)

    def guard(self, line: Line) -> None:
        """Call stalled() of this line if it makes no progress. May be called twice."""
        self._guarded.add(line)

    def unguard(self, line: Line) -> None:
        """Stop guarding this line. May be called twice."""
        self._guarded.discard(line)

    def close(self) -> None:
        def end() -> None:
            self._ended = True

        self.post(end)
        self._thread.join(5.0)
        if self._thread.is_alive():
            log.error("the thread %s did not end; its sockets remain open", self._thread.name)

    def _answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._listener.recv(64)

    def _run(self) -> None:
        try:
            while not self._ended:
                ready = self._selector.select(TICK_S if self._guarded else None)
                for key, _ in ready:
                    self._call(key.data)
                # Before taking the actions: anything posted from now on signals again.
                self._rung = False
                for _ in range(len(self._acts)):
                    self._call(self._acts.popleft())
                self._look()
        finally:
            self._selector.close()
            self._bell.close()
            self._listener.close()

    def _look(self) -> None:
        now_s = awake_s()
        if now_s < self._look_s:
            return
        self._look_s = now_s + TICK_S
        for line in [line for line in self._guarded if now_s - line.moved_s > line.limit_s]:
            self._call(line.stalled)

    @staticmethod
    def _call(act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            # An error of one connection must not end the thread that all others depend on.
            log.exception("unexpected error in a thread of bulk sockets")


def shut(sock: socket.socket) -> None:
    """End a socket that another thread may be using: its calls return at once. May be called twice."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
