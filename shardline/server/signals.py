"""Wakes coroutines when a bucket changes; notify() may come from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardline.host.loops import post


class Signal:
    """Edge-triggered: wait() returns at the next notify(). Waiters check their condition again themselves."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: set[asyncio.Future[bool]] = set()
        self._threads: set[threading.Event] = set()

    def notify(self) -> None:
        """Wake all current waiters; does nothing if the loop is closed, since nobody waits on it then."""
        for event in tuple(self._threads):
            event.set()
        if not self._waiters:
            # A waiter that arms after this sees the change itself.
            return
        post(self._loop, self._wake)

    @property
    def waiters(self) -> int:
        """Number of armed futures that no notify() has resolved."""
        return len(self._waiters)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)
        self._waiters.clear()

    def arm(self) -> asyncio.Future[bool]:
        """A future that the next notify() resolves. Arm before checking the condition, so that nothing is missed."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.add(waiter)
        return waiter

    def disarm(self, waiter: asyncio.Future[bool]) -> None:
        self._waiters.discard(waiter)

    @contextmanager
    def watched(self, event: threading.Event) -> Iterator[None]:
        """Have each notify() set an event too, for a thread without a loop."""
        self._threads.add(event)
        try:
            yield
        finally:
            self._threads.discard(event)

    async def wait(self, waiter: asyncio.Future[bool], timeout_s: float) -> bool:
        """Wait for an armed future; False after timeout_s."""
        # asyncio.wait_for() takes twice as many calls, for every bucket.
        timer = self._loop.call_later(timeout_s, _expire, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self.disarm(waiter)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
