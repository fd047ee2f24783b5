"""Counts of writes to published values, in memory that native code can read."""

from __future__ import annotations

import numpy as np


class Intact:
    """Whether values have not been written to since this was made."""

    def __init__(self, counts: np.ndarray[tuple[int], np.dtype[np.int64]], which: int) -> None:
        self._counts = counts
        self._which = which
        self.count = int(counts[which])

    def __call__(self) -> bool:
        """Whether they are what they were; may be called from any thread, without a lock."""
        return int(self._counts[self._which]) == self.count

    @property
    def address(self) -> int:
        """Of the 8 bytes that hold `count` as long as nothing was written; valid as long as this object is kept."""
        start: int = self._counts.__array_interface__["data"][0]
        return start + self._which * self._counts.itemsize


class WriteCounts:
    """How many times the values of even and of odd steps have begun to be replaced."""

    def __init__(self) -> None:
        self._counts = np.zeros(2, np.int64)

    def begin(self, step: int) -> None:
        """Call before the first byte of a step's values is written."""
        self._counts[step & 1] += 1

    def intact(self, step: int) -> Intact:
        """For who reads the values of a step without a lock: make it before reading what says that they are there."""
        return Intact(self._counts, step & 1)
