"""Pulled buckets: which have arrived, which are held back until the backward pass ends, and waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

Key = tuple[int, int]
"""(shard, bucket)."""
LOOK_S = 1.0
"""Seconds between two checks, during a wait, whether the exchange is overdue."""


class Arrivals:
    """Buckets of one pull of all shards. Lanes report them; the computing thread waits for them.

    While it is holding, nothing is written to the model: the backward pass may need a parameter after its own gradient
    is complete (weights read by a function that has no gradient for them, recomputation). What arrives before the end
    of the step is kept aside, and the computing thread loads it when it is needed.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self.keys = tuple(keys)
        """What the next pull returns."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        """Threads that wait for a change: without any, as in a small step, nobody has to be told."""
        self.holding = False
        """Arriving buckets must not be written to the model yet."""
        self._held: dict[Key, Callable[[], None]] = {}
        self._missing: set[Key] = set()
        self._over = True
        self.on_end: Callable[[], None] = lambda: None
        """Called after end(), on the thread that ended the waits."""

    def begin(self, *, hold: bool) -> None:
        """Begin a pull of all keys. hold: keep arriving buckets aside until release()."""
        with self._lock:
            self._missing = set(self.keys)
            self._held.clear()
            self.holding = hold
            self._over = False

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for this; False after timeout_s. Call with the lock held."""
        self._waiters += 1
        try:
            return self._changed.wait_for(ready, timeout_s)
        finally:
            self._waiters -= 1

    @property
    def waiting(self) -> bool:
        """Whether some bucket has not been loaded yet."""
        return bool(self._missing)

    # Lanes

    def landed(self, key: Key, load: Callable[[], None]) -> None:
        """Note a complete bucket. load() writes it to the model, now on this thread or later on the computing one."""
        if self.holding:
            with self._lock:
                # It may have been released meanwhile; it is never held again in the same pull.
                if self.holding:
                    self._held[key] = load
                    if self._waiters:
                        self._changed.notify_all()
                    return
        load()
        with self._lock:
            self._missing.discard(key)
            if self._waiters:
                self._changed.notify_all()

    def await_release(self, timeout_s: float) -> bool:
        """Wait until nothing is held back any more; False after timeout_s or if the pull was given up."""
        if not self.holding:
            return True
        with self._lock:
            self._wait(lambda: not self.holding or self._over, timeout_s)
            return not self.holding

    def end(self) -> None:
        """End all waits: the exchange has ended, or the pull was given up."""
        with self._lock:
            self._over = True
            if self._waiters:
                self._changed.notify_all()
        self.on_end()

    # The computing thread

    def release(self) -> None:
        """Allow writing to the model from now on."""
        with self._lock:
            self.holding = False
            if self._waiters:
                self._changed.notify_all()

    def load(self, keys: Iterable[Key], look: Callable[[], None] = lambda: None) -> bool:
        """Wait until these buckets are in the model; False if the exchange ended without one of them.

        look: called every LOOK_S while nothing arrives; an exception that it raises ends the wait.
        """
        wanted = [key for key in keys if key in self._missing]

        def some() -> bool:
            return self._over or any(key in self._held or key not in self._missing for key in wanted)

        while wanted:
            with self._lock:
                moved = self._wait(some, LOOK_S)
                ready = [key for key in wanted if key in self._held]
                stuck = self._over and not ready
                loads = [(key, self._held.pop(key)) for key in ready]
            if not moved:
                look()
            for key, load in loads:
                load()
                with self._lock:
                    self._missing.discard(key)
                    if self._waiters:
                        self._changed.notify_all()
            wanted = [key for key in wanted if key in self._missing]
            if stuck and wanted:
                return False
        return True
