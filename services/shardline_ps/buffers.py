"""Memory for buckets on their way in, used again and again.

Buckets come in parallel and in no fixed order, with small objects made in between. Memory that is freed after each
is soon in pieces too small for the next, and the process grows by several times of what staging holds.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from shardline.wire.frames import memory_of

LEAST_BYTES = 64 << 10
"""Smaller ones are left to the allocator, which has places for them."""


class Buffers:
    """Hands out memory, which comes back by itself when the last tensor or view over it is gone. Thread-safe.

    limit: bytes up to which memory is kept that nobody uses, those in use included.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._idle_bytes = 0
        self._used_bytes = 0
        # A view may go anywhere, in the middle of take() too: its end takes no lock.
        self._returned: deque[torch.Tensor] = deque()

    @property
    def held_bytes(self) -> int:
        """In use and idle."""
        with self._lock:
            self._sort()
            return self._used_bytes + self._idle_bytes

    def take(self, nbytes: int) -> memoryview:
        """Memory of so many bytes with anything in it, writable."""
        if nbytes < LEAST_BYTES:
            return memory_of(torch.empty(nbytes, dtype=torch.uint8)) if nbytes else memoryview(b"")
        with self._lock:
            self._sort()
            alike = self._idle.get(nbytes)
            if alike:
                octets = alike.pop()
                self._idle_bytes -= nbytes
            else:
                self._make_room(nbytes)
                octets = torch.empty(nbytes, dtype=torch.uint8)
            self._used_bytes += nbytes
        array = octets.numpy()
        # Everything made of this view refers to the array.
        weakref.finalize(array, self._returned.append, octets).atexit = False
        return memoryview(array)  # type: ignore[arg-type]  # as in memory_of()

    def _sort(self) -> None:
        """Put what has come back among the idle ones, or let it go. Lock held."""
        while self._returned:
            octets = self._returned.popleft()
            nbytes = octets.numel()
            self._used_bytes -= nbytes
            if self._used_bytes + self._idle_bytes + nbytes <= self._limit():
                self._idle.setdefault(nbytes, []).append(octets)
                self._idle_bytes += nbytes

    def _make_room(self, nbytes: int) -> None:
        """Let idle ones of other sizes go. Lock held."""
        for size, alike in list(self._idle.items()):
            while alike and self._used_bytes + self._idle_bytes + nbytes > self._limit():
                alike.pop()
                self._idle_bytes -= size
            if not alike:
                del self._idle[size]
