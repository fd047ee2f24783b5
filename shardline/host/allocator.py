"""How glibc's allocator is to treat messages of some megabytes: keep their memory, in one place."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger("shardline.host.allocator")

KEPT_BYTES = 1 << 30
"""Blocks up to this size are kept when they are freed."""
# Every thread would have an arena of its own, made of 64 MB heaps; one that is empty goes back to the system whatever
# the thresholds say, and a receiving thread's is empty after every push.
ARENAS = 1
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_ARENA_MAX": str(ARENAS),
}
"""The same as environment variables, for processes that are yet to start. Freeing anew each time costs 20-40 % of a
message's processor time."""
# Names of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def tune_allocator() -> bool:
    """Let glibc keep freed blocks of some megabytes instead of giving them back to the system each time.

    Every message of a chunk's size would otherwise fault its pages in anew. For tasks that no launcher started, whose
    environment can't be set any more. Returns whether the allocator obeyed; another libc's is left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        log.debug("the allocator is not glibc's and is left as it is")
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Both thresholds, always: setting the one ends glibc's own adapting of the other.
    wanted = ((M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES), (M_ARENA_MAX, ARENAS))
    refused = [name for name, value in wanted if mallopt(name, value) != 1]
    if refused:
        log.debug("the allocator refused its settings %s", refused)
    return not refused


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later, all size_t."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def taken_bytes() -> int | None:
    """What this process has taken of glibc's allocator and not freed, its own mappings included; None elsewhere."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = (), _Mallinfo2
    found = function()
    return int(found.uordblks) + int(found.hblkhd)


def private_bytes() -> int | None:
    """Memory that this process has of the system for itself: neither files nor shared memory. None where unknown."""
    try:
        _, resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[:3]
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> bool:
    """Give the system every whole page that was freed. Returns whether the allocator could."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return False
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)
    return True
