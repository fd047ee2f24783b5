"""Finished steps on their way to the chief: each is told at least once, as long as there are not too many."""

from __future__ import annotations

import threading
from collections import deque

from shardline.core.orders import StepReport

MAX_REPORTS = 4096
"""Finished steps that wait for the chief, at most; of more the oldest are dropped."""
BEAT_REPORTS = 1024
"""Steps in one beat, at most."""


class ReportQueue:
    """What a task's beats tell of its steps. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[StepReport] = deque(maxlen=MAX_REPORTS)
        self._sent: deque[list[StepReport]] = deque()
        """By beat that the chief may not have received, oldest first."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, report: StepReport) -> None:
        """A finished step."""
        with self._lock:
            self._waiting.append(report)

    def take(self, ended: threading.Event) -> list[StepReport]:
        """Reports for the next beat, kept until it is answered; none where its stream has ended."""
        with self._lock:
            if ended.is_set():
                return []
            taken = [self._waiting.popleft() for _ in range(min(BEAT_REPORTS, len(self._waiting)))]
            self._sent.append(taken)
            return taken

    def answered(self) -> None:
        """The chief has said something: all beats but the newest, which may have crossed it, have arrived."""
        with self._lock:
            while len(self._sent) > 1:
                self._sent.popleft()

    def take_back(self) -> None:
        """The stream has ended: what may not have arrived is told again, some of it perhaps for the second time."""
        with self._lock:
            again = [report for beat in self._sent for report in beat]
            self._sent.clear()
            self._waiting.extendleft(reversed(again[: MAX_REPORTS - len(self._waiting)]))
