"""Gives freed memory that the allocator keeps back to the system, once there is too much of it.

The allocator keeps freed blocks, since messages of some megabytes would fault their pages in anew each time. Most holes
are filled by what comes next. Some are not: torch asks for aligned memory, for which glibc wants a hole a little larger
than the block that left it, and small objects made in between sit at its ends. An optimizer that allocates state
and working memory bucket by bucket can leave more in holes than it has state. So the
holes are measured from time to time, and given back when they exceed the limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardline.host import allocator

log = logging.getLogger("shardline.ps")
LOOK_S = 0.01
"""How often the memory of the process is looked at, at most."""
LATEST_S = 1.0
"""Holes are measured after this time even if the process has not grown."""
GROWN_BYTES = 16 << 20
"""Growth of the process after which they are measured sooner."""
SPARE_BYTES = 64 << 20
"""Limit for holes, besides the unused room in staging."""


@dataclass
class Rule:
    """Decides when to give memory back. Pure."""

    spare: int = SPARE_BYTES
    left: int = 0
    """Bytes that could not be given back the last time: they only look like holes."""

    def too_many(self, unreturned: int, room: int) -> bool:
        """Whether to give back; room: bytes that staging may still come to hold."""
        self.left = max(0, min(self.left, unreturned))
        return unreturned - self.left > self.spare + max(0, room)


class HeapTrimmer:
    """Measures the holes of this process, and gives them back. Thread-safe; nobody waits for another.

    room: bytes that staging may still come to hold: what was freed of them will be taken again.
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
        """Private memory at which holes are measured before their time."""
        self.given_back = 0
        """How often."""
        held, known = private(), taken()
        self.known = held is not None and known is not None
        """Whether this system and its allocator can tell."""
        # What else the process has: code, stacks, Python's objects.
        self._base = (held or 0) - (known or 0)

    def look(self) -> None:
        """Give holes back where there are too many. Cheap: does nothing most of the time."""
        if self.known and self._now_s() >= self._next_s and self._busy.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._busy.release()

    def give_back(self) -> None:
        """Give them back however few they are: what follows needs other memory than what came before."""
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
            log.debug("%.1f MB of freed memory went back to the system", (unreturned - self._unreturned(private)) / 1e6)
        self._grown = private + GROWN_BYTES

    def _give_back(self) -> None:
        self._trim()
        self.given_back += 1
        self._rule.left = max(0, self._unreturned(self._private() or 0))

    def _unreturned(self, private: int) -> int:
        return private - self._base - (self._taken() or 0)
