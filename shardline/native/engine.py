"""The engine: one native thread that moves the bytes of many sockets. native/engine.h says what each call does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shardline.native.library import functions, level
from shardline.native.tls import NativeTls

log = logging.getLogger("shardline.native")
DONE, CLOSED, STALLED, CHANGED, DIGEST = 0, -1, -2, -3, -4
"""See enum engine_status."""
DONE_NOW, DIGEST_NOW, REFUSED = 1, 2, -1
"""See enum engine_answer."""
LINE = 0
"""The item in a report about the whole line."""
CLOSE_S = 5.0
_REPORTS = 256

Report = Callable[[int, int], None]
"""(item, status) of one report on a line."""


class _Done(ctypes.Structure):
    _fields_ = (
        ("line", ctypes.c_uint64),
        ("item", ctypes.c_uint64),
        ("status", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _Calls:
    """The library's functions. Those that only take a lock for a moment keep the interpreter's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        quick, slow = ctypes.PyDLL(library._name), library
        engine, number, address = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
        self.new = self._typed(quick.engine_new, engine, address)
        self.bell = self._typed(quick.engine_bell, ctypes.c_int, engine)
        self.stop = self._typed(quick.engine_stop, None, engine)
        self.open = self._typed(
            quick.engine_open, number, engine, ctypes.c_int, address, ctypes.c_ubyte, ctypes.c_int64
        )
        self.post = self._typed(
            quick.engine_post,
            ctypes.c_int,
            *(engine, number, number, address, ctypes.c_size_t, number, address, ctypes.c_int64),
        )
        self.reap = self._typed(quick.engine_reap, ctypes.c_size_t, engine, address, ctypes.c_size_t)
        self.run = self._typed(slow.engine_run, ctypes.c_int, engine)
        self.close = self._typed(slow.engine_close, None, engine, number)
        self.free = self._typed(slow.engine_free, None, engine)

    @staticmethod
    def _typed(function: Any, result: Any, *arguments: Any) -> Any:
        function.restype, function.argtypes = result, arguments
        return function


def available() -> bool:
    """Whether this process has an engine: Linux, with the native library in use."""
    return hasattr(functions(), "engine_new")


class Engine:
    """A running engine. Its lines belong to one event loop; all methods are for that loop's thread, unless they say so.

    name: of its thread. Raises OSError where the system has no room for it.
    """

    def __init__(self, name: str) -> None:
        library, kernels = functions(), level()
        assert library is not None and kernels is not None
        self._calls = _Calls(library)
        self._engine = self._calls.new(kernels.table)
        if not self._engine:
            raise OSError("the system has no room for another epoll instance and two event descriptors")
        self._done = (_Done * _REPORTS)()
        self._reports: dict[int, Report] = {}
        self._connections: dict[int, NativeTls] = {}
        """By line, those of lines with TLS: the engine uses their memory."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failed = self._calls.run(self._engine)
        if failed:
            log.error("the thread %s ended: %s", self._thread.name, os.strerror(failed))

    def open(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        report: Report,
        *,
        tls: NativeTls | None,
        mark: bytes = b"",
        limit_s: float,
    ) -> int:
        """Take over a connected socket; returns the number of its line. mark: one byte that follows each payload sent.

        report: called on the loop. tls: what encrypts the socket's bytes, after its handshake. limit_s: how long it may
        move nothing while something is posted. Raises OSError.
        """
        if not self._engine:
            raise OSError("the engine has ended")
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._calls.bell(self._engine), self._reap)
        secure = tls.address if tls is not None else None
        limit_ms = round(limit_s * 1000)
        number: int = self._calls.open(self._engine, sock.fileno(), secure, mark[0] if mark else 0, limit_ms)
        if not number:
            raise OSError("there is no memory for another bulk socket")
        sock.detach()
        self._reports[number] = report
        if tls is not None:
            self._connections[number] = tls
        return number

    def post(
        self, line: int, item: int, memory: memoryview, *, digest: int = 0, guard: int | None = None, value: int = 0
    ) -> int:
        """Receive into the memory, or send it, after what was posted before.

        Returns 0 if a report will follow, DONE_NOW or DIGEST_NOW if it is done already, REFUSED if the line is dead.
        memory: at least one byte; keep it until the item or the line is reported, or close_line(). digest: of what is
        received, 0 = any. guard: address of 8 bytes that hold `value` as long as what is sent has not changed.
        """
        if not self._engine:
            return REFUSED
        array = np.frombuffer(memory, np.uint8)
        at = array.__array_interface__["data"][0]
        answer: int = self._calls.post(self._engine, line, item, at, array.nbytes, digest, guard, value)
        return answer

    def close_line(self, line: int) -> None:
        """Close a line: from now on its memory is not touched and nothing is reported. From any thread."""
        self._reports.pop(line, None)
        if self._engine:
            self._calls.close(self._engine, line)
        self._connections.pop(line, None)

    def _reap(self) -> None:
        while self._engine:
            count = self._calls.reap(self._engine, ctypes.addressof(self._done), _REPORTS)
            for done in self._done[:count]:
                report = self._reports.get(done.line)
                if report is not None:
                    report(done.item, done.status)
            if count < _REPORTS:
                return

    def close(self) -> None:
        """End the thread and close every socket, within seconds. From any thread; may be called twice."""
        loop = self._loop
        if loop is None or not loop.is_running() or asyncio._get_running_loop() is loop:
            self._close()
            return
        # The loop may be using the engine just now.
        ended = threading.Event()

        def close() -> None:
            self._close()
            ended.set()

        # A loop that closes meanwhile needs no more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(close)
        if not ended.wait(CLOSE_S):
            log.error("the thread %s did not end; its loop is busy", self._thread.name)

    def _close(self) -> None:
        if not self._engine:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._calls.bell(self._engine))
        self._calls.stop(self._engine)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the thread %s did not end; its sockets remain open", self._thread.name)
            return
        engine, self._engine = self._engine, None
        self._calls.free(engine)
        self._connections.clear()
