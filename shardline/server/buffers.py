"""Reusable memory for incoming buckets.

Buckets come in parallel and in no fixed order, with small objects allocated in between. If memory were freed after
each, it would soon be too fragmented for the next, and the process would grow to several times the size of staging.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

LEAST_BYTES = 64 << 10
"""Smaller sizes are left to the allocator, which reuses them well."""


class Buffers:
    """Lends memory, which returns by itself when the last tensor or view over it is gone. Thread-safe.

    limit: bytes up to which idle memory is kept, including memory in use. spoken_for: bytes of the same limit that are
    in use here or elsewhere (messages, codec outputs, sums), as far as known.
    """

    def __init__(self, limit: Callable[[], int], spoken_for: Callable[[], int] = lambda: 0) -> None:
        self._limit = limit
        self._spoken_for = spoken_for
        self._lock = threading.Lock()
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._idle_bytes = 0
        self._used_bytes = 0
        # A view may be freed at any time, even during take(), so its finalizer takes no lock.
        self._returned: deque[torch.Tensor] = deque()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            self._sort()
            self._make_room()
            return self._used_bytes + self._idle_bytes

    def take(self, nbytes: int) -> memoryview:
        """Writable memory of nbytes bytes with any content."""
        if nbytes < LEAST_BYTES:
            return memoryview(bytearray(nbytes)) if nbytes else memoryview(b"")
        with self._lock:
            self._sort()
            alike = self._idle.get(nbytes)
            octets = alike.pop() if alike else None
            self._idle_bytes -= nbytes if octets is not None else 0
            self._make_room(nbytes)
            if octets is None:
                octets = torch.empty(nbytes, dtype=torch.uint8)
            # Counted after allocation: one that fails does not count.
            self._used_bytes += nbytes
        array = octets.numpy()
        # Everything made from this view references the array.
        weakref.finalize(array, self._returned.append, octets).atexit = False
        return memoryview(array)  # type: ignore[arg-type]  # as in memory_of()

    def fit(self) -> None:
        """Free idle memory if its room was granted to something that does not use take()."""
        if self._idle_bytes or self._returned:
            with self._lock:
                self._sort()
                self._make_room()

    def _sort(self) -> None:
        """Move returned memory to the idle lists. Call with the lock held, then call _make_room()."""
        while self._returned:
            octets = self._returned.popleft()
            nbytes = octets.numel()
            self._used_bytes -= nbytes
            self._idle_bytes += nbytes
            self._idle.setdefault(nbytes, []).append(octets)

    def _make_room(self, coming: int = 0) -> None:
        """Free idle memory of any size until the rest, plus `coming` bytes, fits the limit. Call with the lock held."""
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
