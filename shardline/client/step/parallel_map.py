"""Several threads for passes over much memory: one core alone does not reach what the memory gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 4
"""Threads, the caller's included: a few reach the memory's limit."""
WORTH_BYTES = 8 << 20
"""Less is done by the caller alone before another thread is awake."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ParallelMap:
    """Runs one action over many items on the caller's thread and some of its own, which begin when first needed.

    threads: with the caller's; 0 = as many as there are cores, MOST at most. each() may be called by one thread at a
    time.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads or min(MOST, usable_cores())
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def each(self, act: Callable[[Item], Result], items: Sequence[Item], nbytes: int) -> list[Result]:
        """act(item) for every item, in no particular order; the results in the items' order.

        nbytes: what all of them come to; little is done on the caller's thread alone. act must let go of the
        interpreter's lock for most of its time, or there is nothing to gain. Raises the first error of all, by the
        order of items, when none is under way any more.
        """
        shares = min(self._threads, len(items))
        if shares < 2 or nbytes < WORTH_BYTES:
            return [act(item) for item in items]
        left = iter(range(len(items)))
        results: dict[int, Result] = {}
        errors: dict[int, Exception] = {}

        def work() -> None:
            while not errors:
                with self._lock:
                    number = next(left, None)
                if number is None:
                    return
                try:
                    results[number] = act(items[number])
                except Exception as error:
                    errors[number] = error

        helpers = [self._helpers().submit(work) for _ in range(shares - 1)]
        work()
        for helper in helpers:
            # One that has not begun is not needed any more. The others' items end by themselves, as the caller's do.
            if not helper.cancel():
                helper.result()
        if errors:
            raise errors[min(errors)]
        return [results[number] for number in range(len(items))]

    def _helpers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="map")
        return self._pool

    def close(self) -> None:
        """End the threads; may be called twice. each() is not called any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
