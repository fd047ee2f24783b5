"""When the job last moved, and how often it usually does. The time is an argument."""

from __future__ import annotations

import statistics
from collections import deque

STILL_S = 5.0
"""Seconds without a movement after which a job may stand still."""
FIRST_S = 30.0
"""Limit before the first movement: compiling a model, or reading the first batches, takes a while."""
TIMES = 3.0
"""A job stands still after this many times its usual time between two movements, or after STILL_S if that is longer."""
GAPS = 20
"""Last movements that the usual time is taken from."""


def patience_s(usual_s: float | None) -> float:
    """Seconds without a movement after which something stands still. usual_s: between two movements; None = unknown."""
    return FIRST_S if usual_s is None else max(STILL_S, TIMES * usual_s)


class Motion:
    """Movements of one job, such as steps closed or updates applied."""

    def __init__(self, told_s: float = 0.0) -> None:
        """told_s: seconds between two reports of the tasks, between which no movement is seen."""
        self._told_s = told_s
        self.moved_s: float | None = None
        """When it last moved, or began to train; None before."""
        self._mark: object = None
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def note(self, mark: object, now_s: float) -> None:
        """Look at the job. mark: differs from the last one if the job has moved."""
        if self.moved_s is not None and mark != self._mark:
            self._gaps.append(now_s - self.moved_s)
        if self.moved_s is None or mark != self._mark:
            self._mark, self.moved_s = mark, now_s

    def still_s(self, now_s: float) -> float | None:
        """Seconds since the last movement, if that is longer than usual; None while the job moves."""
        if self.moved_s is None:
            return None
        # The median: one long gap, such as an evaluation or an earlier standstill, makes nobody more patient.
        usual_s = statistics.median(self._gaps) if self._gaps else None
        seconds = now_s - self.moved_s
        return seconds if seconds >= max(patience_s(usual_s), TIMES * self._told_s) else None
