"""How glibc's allocator is to treat messages of some megabytes: keep their memory, in one place."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("shardline.allocator")

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
