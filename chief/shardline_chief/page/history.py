"""Curves of a run for the chief's page, in bounded memory: however long the run, a curve has at most POINTS points.

A curve is divided into bins of equal width; a bin keeps the mean of its points. When there are too many bins, each pair
is merged into one of twice the width, so old and new parts of a curve always have the same resolution.

Readers ask for what changed since their last request: changes are numbered, and the cursor is the last number seen.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

POINTS = 2000
"""Most points of a curve; half as many after bins were merged."""
CURVES = 32
"""Most curves: the job names its evaluation metrics, and each has a curve."""
STEP, TIME = "step", "time"
"""x axis of a curve: the job's step, or Unix time in seconds."""


@dataclass
class _Bin:
    count: int
    x: float
    y: float
    changed: int

    def add(self, other: _Bin) -> None:
        total = self.count + other.count
        self.x += (other.x - self.x) * other.count / total
        self.y += (other.y - self.y) * other.count / total
        self.count = total
        self.changed = max(self.changed, other.changed)


@dataclass
class Curve:
    """One curve. Points may come in any order; those in one bin are averaged."""

    axis: str
    width: float = 1.0
    """Width of a bin, in units of the axis."""
    limit: int = POINTS
    bins: dict[int, _Bin] = field(default_factory=dict)
    renewed: int = 0
    """Number of the last change that moved or removed points, after which readers must fetch the whole curve."""

    def add(self, x: float, y: float, changed: int) -> None:
        """Add a point; it is ignored if a coordinate is not finite."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self._put(math.floor(x / self.width), _Bin(1, x, y, changed))
        while len(self.bins) > self.limit:
            old, self.bins = self.bins, {}
            self.width *= 2
            self.renewed = changed
            for number, item in old.items():
                self._put(number // 2, item)

    def _put(self, number: int, item: _Bin) -> None:
        if number in self.bins:
            self.bins[number].add(item)
        else:
            self.bins[number] = item

    def forget(self, x: float, changed: int) -> None:
        beyond = [number for number, item in self.bins.items() if item.x > x]
        for number in beyond:
            del self.bins[number]
        if beyond:
            self.renewed = changed

    def since(self, cursor: int) -> dict[str, Any] | None:
        """Points changed after that change, as JSON; None if there are none.

        points: [bin, x, y] in ascending order. `reset`: they are the whole curve and replace the old one.
        """
        reset = self.renewed > cursor
        points = sorted(
            [number, item.x, item.y] for number, item in self.bins.items() if reset or item.changed > cursor
        )
        return {"axis": self.axis, "reset": reset, "points": points} if points or reset else None


class History:
    """All curves of one run. Thread-safe: the control thread writes, the page's thread reads."""

    def __init__(self, *, points: int = POINTS, curves: int = CURVES) -> None:
        self._points = points
        self._most = curves
        self._curves: dict[str, Curve] = {}
        self._changed = 0
        self._lock = threading.Lock()
        self._life = uuid.uuid4().hex[:8]
        """Distinguishes cursors of this process from those of an earlier one."""

    def add(self, name: str, x: float, y: float, *, axis: str = STEP, width: float = 1.0) -> None:
        """Add a point to a curve; the first point creates it, unless there are too many."""
        with self._lock:
            curve = self._curves.get(name)
            if curve is None:
                if len(self._curves) >= self._most:
                    return
                curve = self._curves[name] = Curve(axis, width, self._points)
            self._changed += 1
            curve.add(x, y, self._changed)

    def forget(self, step: int) -> None:
        """A timeline begins at this step: remove what an earlier one drew beyond it; points at the step itself stay."""
        with self._lock:
            self._changed += 1
            for curve in self._curves.values():
                if curve.axis == STEP:
                    curve.forget(step, self._changed)

    def since(self, cursor: str = "") -> dict[str, Any]:
        """What changed since a cursor, "" for everything, as JSON: the next cursor and the changed curves by name.

        An invalid cursor, or one of another process, gets everything, each curve marked `reset`.
        """
        life, _, number = cursor.partition("-")
        known = life == self._life and number.isascii() and number.isdigit() and len(number) <= 15
        from_change = int(number) if known else 0
        with self._lock:
            found = {name: curve.since(from_change) for name, curve in self._curves.items()}
            curves = {name: part if known else {**part, "reset": True} for name, part in found.items() if part}
            return {"cursor": f"{self._life}-{self._changed}", "reset": not known, "curves": curves}

    def names(self) -> Iterable[str]:
        with self._lock:
            return tuple(self._curves)
