"""Returns freed memory that the allocator keeps to the system, once there is too much of it.

The allocator keeps freed blocks, since messages of some megabytes would otherwise fault in their pages again each
time. Most of these holes are filled by the next blocks. Some are not: torch asks for aligned memory, for which glibc
needs a hole a little larger than the block it came from, and small objects allocated in between occupy its ends. An
optimizer that allocates state and working memory bucket by bucket can leave more bytes in holes than in state. So the
holes are measured from time to time, and returned when they exceed the limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardline.host import allocator

log = logging.getLogger("shardline.ps")
LOOK_S = 0.05
"""Fewest seconds between two looks at the process's memory."""
LATEST_S = 1.0
"""Seconds after which holes are measured even if the process has not grown."""
GROWN_BYTES = 16 << 20
"""Growth of the process, in bytes, after which they are measured sooner."""
SPARE_BYTES = 64 << 20
"""Limit for holes, in bytes, besides the unused room in staging."""


@dataclass
class Rule:
    """Decides when to return memory. Pure."""

    spare: int = SPARE_BYTES
    left: int = 0
    """Bytes that could not be returned last time: they only look like holes."""

    def too_many(self, unreturned: int, room: int) -> bool:
        """Whether to return memory now. unreturned, room: bytes; room is what staging may still use."""
        self.left = max(0, min(self.left, unreturned))
        return unreturned - self.left > self.spare + max(0, room)


class HeapTrimmer:
    """Measures this process's holes, and returns them to the system. Thread-safe; callers never wait for each other.

    room: bytes that staging may still use; that much freed memory will soon be needed again.
    """

    def __init__(
        self,
        room: Callable[[], int],
        *,
        private: Callable[[], int | None] = allocator.private_bytes,
        taken: Callable[[], int | None] = allocator.taken_bytes,
        trim: Callable[[], bool] = allocator.give_back,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._private = private
        self._taken = taken
        self._trim = trim
        self._now_s = now_s
        self._rule = Rule()
        self._busy = threading.Lock()
        self._next_s = 0.0
        self._latest_s = 0.0
        self._grown = 0
        """Private memory, in bytes, at which holes are measured early."""
        self.given_back = 0
        """How many times memory was returned."""
        held, known = private(), taken()
        self.known = held is not None and known is not None
        """Whether this system and its allocator report the sizes."""
        # What else the process holds: code, stacks, Python objects.
        self._base = (held or 0) - (known or 0)

    def look(self) -> None:
        """Return memory if there are too many holes. Cheap: usually does nothing."""
        if self.known and self._now_s() >= self._next_s and self._busy.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._busy.release()

    def give_back(self) -> None:
        """Return all holes, however few: the next allocations will have other sizes."""
        if self.known:
            with self._busy:
                self._give_back()

    def _look(self) -> None:
        now_s = self._now_s()
        self._next_s = now_s + LOOK_S
        private = self._private() or 0
        if private < self._grown and now_s < self._latest_s:
            return
        self._latest_s = now_s + LATEST_S
        unreturned = self._unreturned(private)
        if self._rule.too_many(unreturned, self._room()):
            self._give_back()
            private = self._private() or 0
            log.debug("returned %.1f MB of freed memory to the system", (unreturned - self._unreturned(private)) / 1e6)
        self._grown = private + GROWN_BYTES

    def _give_back(self) -> None:
        self._trim()
        self.given_back += 1
        self._rule.left = max(0, self._unreturned(self._private() or 0))

    def _unreturned(self, private: int) -> int:
        return private - self._base - (self._taken() or 0)
