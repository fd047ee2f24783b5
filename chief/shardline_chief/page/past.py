"""A run as its logs under OUT/logs tell it: for a chief that continues it, and for a page without a chief.

steps.jsonl has loss and staleness, events.jsonl the evaluations, rates.jsonl bytes and steps per second. They are added
to the History in order of time, as they were at first, so bins, limits and rollbacks come out the same.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from shardline.core.status import EventStatus
from shardline.host import files
from shardline_chief.page.history import TIME, History
from shardline_chief.rules.standstill import Motion

NOT_FINITE = "not_finite"
"""Field that says what a number was that is null: {"loss": "nan"}."""


def to_line(fields: Mapping[str, Any]) -> str:
    """A line for these fields, without its end. Numbers that are not finite are null, and are named in NOT_FINITE."""
    lost: dict[str, str] = {}

    def without(value: Any, path: str) -> Any:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        lost[path] = str(value)
        return None

    found = _each(fields, without)
    return json.dumps({**found, NOT_FINITE: lost} if lost else found, default=str, allow_nan=False)


def restored(line: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line, with the numbers that are not finite in their places."""
    lost = line.pop(NOT_FINITE, None)
    if isinstance(lost, dict):
        known = {path: float(what) for path, what in lost.items() if what in ("nan", "inf", "-inf")}
        line = _each(line, lambda value, path: known.get(path) if value is None else value)
    return line


def _each(value: Any, change: Callable[[Any, str], Any], path: str = "") -> Any:
    """A value with what `change` makes of each single one in it, given its path."""
    before = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {name: _each(item, change, f"{before}{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each(item, change, f"{before}{number}") for number, item in enumerate(value)]
    return change(value, path)


log = logging.getLogger("shardline_chief")

RATE_WIDTH_S = 0.5
"""Initial width of a bin in curves along time, in seconds."""
RATES = {"push": "push_bytes_per_s", "pull": "pull_bytes_per_s", "steps": "steps_per_s"}
"""Field of rates.jsonl, by curve."""
READ_BYTES = 8 << 20
"""Most bytes read of a file: about 40,000 steps, in a second. Of a longer file, evenly spread pieces are read."""
PIECE_BYTES = 16 << 10

EVENT_S = 0.001
"""Event times are rounded down to milliseconds: without this, one could precede the step that it followed."""

EVENTS_SHOWN = 50
STALENESS = 100
"""Steps that the present staleness is taken over."""

Told = tuple[float, Callable[[], None]]
"""Unix time of a line in seconds, and its effect on the curves."""


class Past:
    """The log files of a run in a folder. A file may grow: each read() goes on where the last one ended."""

    def __init__(self, history: History, folder: Path) -> None:
        """history: the curves to fill."""
        self._history = history
        self._folder = folder
        self._files = {name: Tail(folder / f"{name}.jsonl") for name in ("steps", "events", "rates")}
        self.timeline: int | None = None
        """Timeline of the last step; None before the first."""
        self.loss = math.nan
        self.staleness: deque[float] = deque(maxlen=STALENESS)
        """Of the last steps, in versions."""
        self.rates: Mapping[str, Any] = {}
        """The last line of rates.jsonl."""
        self.motion = Motion()
        """Movements of the job, by the times of these lines."""
        self.said: deque[EventStatus] = deque(maxlen=EVENTS_SHOWN)
        self.lives: dict[str, tuple[float, str]] = {}
        """Last reported state of each task, and its Unix time."""

    def read(self) -> None:
        """Take in what is new. Missing files and invalid lines are skipped."""
        try:
            for _, tell in heapq.merge(self._steps(), self._events(), self._rates(), key=lambda told: told[0]):
                tell()
        except OSError as error:
            log.warning("the curves of the page are incomplete: %s can't be read (%s)", self._folder, error.strerror)

    def written(self) -> float:
        """Unix time of the last change of a file; 0 if there is none."""
        return max(file.written() for file in self._files.values())

    def _steps(self) -> Iterator[Told]:
        for line in self._files["steps"].lines():
            try:
                step, loss, staleness = int(line["step"]), float(line["loss"]), float(line["staleness"])
                time_s, timeline = float(line["time"]), int(line["timeline"])
                logged = {str(name): float(value) for name, value in line.get("logged", {}).items()}
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                continue
            back = self.timeline not in (None, timeline)
            self.timeline = timeline

            def tell(
                step: int = step,
                loss: float = loss,
                staleness: float = staleness,
                back: bool = back,
                logged: Mapping[str, float] = logged,
            ) -> None:
                if back:
                    # The run was rolled back to this step, or continued from it.
                    self._history.forget(step)
                self._history.add("loss", step, loss)
                self._history.add("staleness", step, staleness)
                for name, value in logged.items():
                    self._history.add(f"logged/{name}", step, value)
                self.loss = loss
                self.staleness.append(staleness)

            yield time_s, tell

    def _events(self) -> Iterator[Told]:
        for line in self._files["events"].lines():
            try:
                time_s = datetime.fromisoformat(line["time"]).timestamp()
                level, sentence = str(line["level"]), str(line["message"])
            except (KeyError, TypeError, ValueError, OverflowError):
                continue

            def tell(
                line: dict[str, Any] = line, time_s: float = time_s, said: tuple[str, str] = (level, sentence)
            ) -> None:
                self.said.append(EventStatus(time=time_s, level=said[0], sentence=said[1]))
                if line.get("kind") == "evaluation":
                    self._evaluation(line)
                state = "dead" if line.get("kind") == "ps_lost" else line.get("state")
                if isinstance(state, str) and isinstance(line.get("task"), str):
                    self.lives[line["task"]] = (time_s, state)

            yield time_s + EVENT_S, tell

    def _evaluation(self, line: Mapping[str, Any]) -> None:
        try:
            step = int(line["step"])
            metrics = {str(name): float(value) for name, value in line["metrics"].items()}
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return
        for name, value in metrics.items():
            self._history.add(f"evaluation/{name}", step, value)

    def _rates(self) -> Iterator[Told]:
        for line in self._files["rates"].lines():
            try:
                time_s = float(line["time"])
                found = {field: float(line[field]) for field in RATES.values()}
            except (KeyError, TypeError, ValueError, OverflowError):
                continue

            def tell(line: dict[str, Any] = line, time_s: float = time_s, found: dict[str, float] = found) -> None:
                add_rates(self._history, time_s, found)
                self.rates = line
                self.motion.note((line.get("timeline"), line.get("step")), time_s)

            yield time_s, tell


def recall(history: History, folder: Path) -> int | None:
    """Fill the curves from the log files in a folder; returns the timeline of the last step, None if there is none."""
    past = Past(history, folder)
    past.read()
    return past.timeline


def add_rates(history: History, time_s: float, fields: dict[str, Any]) -> None:
    """Add points to the curves along time. fields: those of a line of rates.jsonl."""
    for curve, field in RATES.items():
        history.add(curve, time_s, float(fields[field]), axis=TIME, width=RATE_WIDTH_S)


class Tail:
    """The lines of a file that may grow, each read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        """Bytes that have been read."""

    def written(self) -> float:
        """Unix time of its last change; 0 if there is no such file."""
        try:
            return self._path.stat().st_mtime
        except OSError:
            return 0.0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The JSON objects of the new lines; invalid ones are skipped."""
        for text in self._texts():
            try:
                found = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield restored(found)

    def _texts(self) -> Iterator[bytes]:
        """The new lines; of more than READ_BYTES only those within evenly spread pieces."""
        try:
            file = files.open_binary(self._path)
        except FileNotFoundError:
            return
        with file:
            begin, size = self._at, os.fstat(file.fileno()).st_size
            if size - begin <= READ_BYTES:
                file.seek(begin)
                # A line that is still being written, or that a death cut short, has no end.
                *lines, rest = file.read(size - begin).split(b"\n")
                self._at = size - len(rest)
                yield from lines
                return
            count = READ_BYTES // PIECE_BYTES
            for number in range(count):
                # Read one byte earlier, to see whether a line begins at the start; the last piece ends with the file.
                start = begin + number * (size - begin - PIECE_BYTES) // (count - 1)
                file.seek(max(begin, start - 1))
                *lines, rest = file.read(PIECE_BYTES + (number > 0)).split(b"\n")
                yield from lines[1:] if number else lines
            self._at = size - len(rest)
