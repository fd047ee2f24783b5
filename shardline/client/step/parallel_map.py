"""Several threads for passes over much memory: a single core does not use the full memory bandwidth."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardline.host.process import usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 4
"""Maximum number of threads, including the caller's: a few saturate the memory bandwidth."""
WORTH_BYTES = 8 << 20
"""For fewer bytes, the caller alone is done before another thread wakes up."""


class ParallelMap:
    """Runs one action over many items on the caller's thread and a few others, started when first needed.

    threads: number including the caller's; 0 = the number of cores, at most MOST. Only one thread at a time may call
    each().
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads or min(MOST, usable_cores())
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def each(self, act: Callable[[Item], Result], items: Sequence[Item], nbytes: int) -> list[Result]:
        """Call act(item) for every item, in no particular order; returns the results in the order of the items.

        nbytes: total size of the items; small jobs run on the caller's thread alone. act must release the GIL most of
        the time, or there is no gain. If calls fail, raises the error of the first such item, after all calls have
        ended.
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
            # A helper that has not begun is not needed any more. The others finish their current item.
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
        """End the threads; may be called twice. each() must not be called afterwards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
