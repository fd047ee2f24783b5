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

from shardline.core.tensor_bytes import memory_of

LEAST_BYTES = 64 << 10
"""Smaller ones are left to the allocator, which has places for them."""


class Buffers:
    """Lends memory, which comes back by itself when the last tensor or view over it is gone. Thread-safe.

    limit: bytes up to which memory is kept that nobody uses, those in use included. spoken_for: bytes of the same limit
    that are in use here or elsewhere (messages, what codecs make, sums), as far as that is known.
    """

    def __init__(self, limit: Callable[[], int], spoken_for: Callable[[], int] = lambda: 0) -> None:
        self._limit = limit
        self._spoken_for = spoken_for
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
            self._make_room()
            return self._used_bytes + self._idle_bytes

    def take(self, nbytes: int) -> memoryview:
        """Memory of so many bytes with anything in it, writable."""
        if nbytes < LEAST_BYTES:
            return memory_of(torch.empty(nbytes, dtype=torch.uint8)) if nbytes else memoryview(b"")
        with self._lock:
            self._sort()
            alike = self._idle.get(nbytes)
            octets = alike.pop() if alike else None
            self._idle_bytes -= nbytes if octets is not None else 0
            self._make_room(nbytes)
            if octets is None:
                octets = torch.empty(nbytes, dtype=torch.uint8)
            # Counted once it is mapped: an allocation that fails counts for nobody.
            self._used_bytes += nbytes
        array = octets.numpy()
        # Everything made of this view refers to the array.
        weakref.finalize(array, self._returned.append, octets).atexit = False
        return memoryview(array)  # type: ignore[arg-type]  # as in memory_of()

    def fit(self) -> None:
        """Let idle memory go where the room was granted to something that does not take() it."""
        if self._idle_bytes or self._returned:
            with self._lock:
                self._sort()
                self._make_room()

    def _sort(self) -> None:
        """Put what has come back among the idle ones. Lock held; _make_room() has to follow."""
        while self._returned:
            octets = self._returned.popleft()
            nbytes = octets.numel()
            self._used_bytes -= nbytes
            self._idle_bytes += nbytes
            self._idle.setdefault(nbytes, []).append(octets)

    def _make_room(self, coming: int = 0) -> None:
        """Let idle ones go, of any size, until the others have room, and bytes that come. Lock held."""
        excess = self._idle_bytes + max(self._used_bytes + coming, self._spoken_for()) - self._limit()
        if excess <= 0:
            return
        for size, alike in list(self._idle.items()):
            while alike and excess > 0:
                alike.pop()
                self._idle_bytes -= size
                excess -= size
            if not alike:
                del self._idle[size]
