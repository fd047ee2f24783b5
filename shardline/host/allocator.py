"""Settings of glibc's allocator for messages of some megabytes: keep their memory, in one arena."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger("shardline.host.allocator")

KEPT_BYTES = 1 << 30
"""Freed blocks up to this size are kept."""
# Otherwise every thread has an arena of its own, made of 64 MB heaps. Empty heaps are returned to the system whatever
# the thresholds, and a receiving thread's heap is empty after every push.
ARENAS = 1
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
    "MALLOC_ARENA_MAX": str(ARENAS),
}
"""The same as environment variables, for processes yet to be started. Allocating fresh pages each time costs 20-40 % of
a message's processor time."""
# Names in glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def tune_allocator() -> bool:
    """Let glibc keep freed blocks of some megabytes instead of returning them to the system each time.

    Otherwise every message of a chunk's size faults in its pages again. For tasks not started by the launcher, whose
    environment can't be set any more. Returns whether the allocator accepted; other libcs are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        log.debug("the allocator is not glibc's; its settings are unchanged")
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    # Always both thresholds: setting one stops glibc from adapting the other.
    wanted = ((M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES), (M_ARENA_MAX, ARENAS))
    refused = [name for name, value in wanted if mallopt(name, value) != 1]
    if refused:
        log.debug("the allocator refused the settings %s", refused)
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
    """Bytes allocated from glibc and not freed, including its direct mappings; None with other libcs."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = (), _Mallinfo2
    found = function()
    return int(found.uordblks) + int(found.hblkhd)


def private_bytes() -> int | None:
    """Bytes of this process's private memory: neither files nor shared memory. None if unknown."""
    try:
        _, resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[:3]
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> bool:
    """Return all free whole pages to the system. Returns whether the allocator supports it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return False
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)
    return True
