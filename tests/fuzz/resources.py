"""What a process holds: memory, threads, descriptors; whether it comes back to the level before."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

SETTLE_S = 15.0
MB = 1 << 20


@dataclass(frozen=True)
class Level:
    """How much of each there is."""

    threads: int
    descriptors: int
    tasks: int


def level(tasks: Callable[[], int]) -> Level:
    """As it is now."""
    return Level(threading.active_count(), len(os.listdir("/proc/self/fd")), tasks())


def at_rest(tasks: Callable[[], int]) -> Level:
    """As it is when nothing has changed for a while."""
    found, since_s = level(tasks), time.monotonic()
    while time.monotonic() - since_s < 0.3:
        time.sleep(0.02)
        now = level(tasks)
        if now != found:
            found, since_s = now, time.monotonic()
    return found


def settles(rest: Level, tasks: Callable[[], int], *, slack: int = 2) -> str:
    """Wait until no more is held than at rest; what is, where that never comes.

    slack: threads and descriptors that gRPC takes and gives back as it likes.
    """
    end_s = time.monotonic() + SETTLE_S
    while True:
        now = level(tasks)
        more = [
            f"{name}: {getattr(now, name)} where {getattr(rest, name)} were"
            for name in ("threads", "descriptors", "tasks")
            if getattr(now, name) > getattr(rest, name) + slack
        ]
        if not more:
            return ""
        if time.monotonic() > end_s:
            return f"still held after {SETTLE_S:.0f} s: {', '.join(more)}"
        gc.collect()
        time.sleep(0.02)


def rss_mb() -> float:
    """Memory of this process in MB, without what its allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss) / MB


def peak_mb() -> float:
    """The most it ever was, since reset_peak() where the kernel knows that."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def reset_peak() -> None:
    """Begin to count the peak anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
