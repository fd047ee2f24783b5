"""The time in which this process ran: time.monotonic() without the time in which the process was stopped.

A process that is stopped (SIGSTOP, a frozen container, a virtual machine that is moved) hears nobody, while the clock
goes on. So a silence is measured in the time in which somebody could have been heard: a long gap between two readings
counts as a short one. All deadlines after which somebody else counts as silent, lost or dead are kept in it; durations
that are only shown are not. PROTOCOL 1.6.
"""

from __future__ import annotations

import os
import threading
import time

TICK_S = 0.1
"""Seconds between two readings, at most, while the process runs."""
LONGEST_S = 0.5
"""Seconds that a longer gap counts as; on a busy machine a reading may be late."""


class AwakeTime:
    """Takes off a clock the time in which nobody read it. Pure; the clock is an argument."""

    def __init__(self, now_s: float) -> None:
        self.seen = now_s, 0.0
        """The last reading of the clock, and `away_s` then; threads get both at once."""

    @property
    def away_s(self) -> float:
        """Seconds in which the process did not run."""
        return self.seen[1]

    def at(self, now_s: float) -> float:
        """The time at a reading of the clock; never less than at the one before, and as fast as the clock at most."""
        last_s, away_s = self.seen
        away_s += max(0.0, now_s - last_s - LONGEST_S)
        self.seen = now_s, away_s
        return now_s - away_s


class AwakeWatch:
    """Reads the clock every TICK_S, on a thread of its own, so that long gaps are only those of a stopped process."""

    def __init__(self) -> None:
        self.awake = AwakeTime(time.monotonic())
        self.forked()

    def forked(self) -> None:
        """In a new process, which has no such thread, and a lock that another thread may hold for ever."""
        # A signal's handler, or a finalizer, may ask while its own thread reads.
        self._lock = threading.RLock()
        self._ticks = False
        self._never = threading.Event()

    def read(self) -> float:
        # Several times in each step: without the lock, if a tick was just now. The clock comes last, so that a pause
        # before it shows.
        last_s, away_s = self.awake.seen
        now_s = time.monotonic()
        if self._ticks and now_s - last_s < LONGEST_S / 2:
            return now_s - away_s
        return self._tick()

    def _tick(self) -> float:
        with self._lock:
            if not self._ticks:
                self._start()
            return self.awake.at(time.monotonic())

    @property
    def away_s(self) -> float:
        """Seconds in which the process did not run, up to now."""
        self.read()
        return self.awake.away_s

    def _start(self) -> None:
        self._ticks = True
        try:
            threading.Thread(target=self._run, name="awake", daemon=True).start()
        except RuntimeError:
            # There are too many threads, or the interpreter is ending: the next reading tries again.
            self._ticks = False

    def _run(self) -> None:
        while not self._never.wait(TICK_S):
            self._tick()


_watch = AwakeWatch()
os.register_at_fork(after_in_child=_watch.forked)


def awake_s() -> float:
    """Seconds, comparable within this process only. The clock for whoever judges a silence."""
    return _watch.read()


def away_s() -> float:
    """Seconds in which this process did not run, up to now.

    A call that failed while this number grew was not necessarily refused or unanswered: its deadline may have passed,
    or its connection been given up, while nobody was there to hear the answer.
    """
    return _watch.away_s
