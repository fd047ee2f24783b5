"""Finished steps on their way to the chief: each is sent at least once, unless there are too many."""

from __future__ import annotations

import threading
from collections import deque

from shardline.core.orders import PassReport, StepReport

MAX_REPORTS = 4096
"""Most finished steps waiting to be sent; beyond that the oldest are dropped."""
BEAT_REPORTS = 1024
"""Most steps in one heartbeat."""
MAX_LOGGED, MAX_LOGGED_NAME = 32, 64
"""Most logged figures of a step, and most bytes of a name."""
BEAT_FIGURES = 6000
"""Logged figures after which a heartbeat takes no further step: half a megabyte with the longest names."""
MAX_PASSES = 2048
"""Most passes of a pipeline in one heartbeat, and most that wait for it: 80 kB. Beyond that the oldest are dropped."""


class ReportQueue:
    """Step reports for a task's heartbeats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[StepReport] = deque(maxlen=MAX_REPORTS)
        self._sent: deque[list[StepReport]] = deque()
        """Reports of each heartbeat that the chief may not have received, oldest first."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, report: StepReport) -> None:
        with self._lock:
            self._waiting.append(report)

    def take(self, ended: threading.Event) -> list[StepReport]:
        """Reports for the next heartbeat, kept until it is answered; none if its stream has ended."""
        with self._lock:
            if ended.is_set():
                return []
            taken: list[StepReport] = []
            figures = 0
            while self._waiting and len(taken) < BEAT_REPORTS and figures < BEAT_FIGURES:
                taken.append(self._waiting.popleft())
                figures += len(taken[-1].logged)
            self._sent.append(taken)
            return taken

    def answered(self) -> None:
        """The chief has answered: all heartbeats but the newest, which may have crossed the answer, have arrived."""
        with self._lock:
            while len(self._sent) > 1:
                self._sent.popleft()

    def take_back(self) -> None:
        """The stream has ended: send again what may not have arrived; some of it may be sent twice."""
        with self._lock:
            again = [report for beat in self._sent for report in beat]
            self._sent.clear()
            self._waiting.extendleft(reversed(again[: MAX_REPORTS - len(self._waiting)]))


class PassQueue:
    """Passes of a pipeline for a worker's heartbeats. Thread-safe.

    They are for show: what a broken connection loses is not sent again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[PassReport] = deque(maxlen=MAX_PASSES)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, report: PassReport) -> None:
        with self._lock:
            self._waiting.append(report)

    def take(self) -> list[PassReport]:
        """Passes since the last call, in order."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            return taken
