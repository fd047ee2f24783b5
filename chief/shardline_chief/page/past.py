"""Curves of a continued run: read back from what earlier chiefs wrote under OUT/logs.

steps.jsonl has loss and staleness, events.jsonl the evaluations, rates.jsonl bytes and steps per second. They are added
to the History in order of time, as they were at first, so bins, limits and rollbacks come out the same.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from shardline.host import files
from shardline_chief.page.history import TIME, History

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

Told = tuple[float, Callable[[], None]]
"""Unix time of a line in seconds, and its effect on the curves."""


def recall(history: History, folder: Path) -> int | None:
    """Fill the curves from the log files in a folder. Missing files and invalid lines are skipped.

    Returns the timeline of the last step, or None if there is none.
    """
    newest: list[int] = []
    sources = (_steps(history, folder, newest), _evaluations(history, folder), _rates(history, folder))
    try:
        for _, tell in heapq.merge(*sources, key=lambda told: told[0]):
            tell()
    except OSError as error:
        log.warning("the curves of the page start empty: %s can't be read (%s)", folder, error.strerror)
    return newest[0] if newest else None


def add_rates(history: History, time_s: float, fields: dict[str, Any]) -> None:
    """Add points to the curves along time. fields: those of a line of rates.jsonl."""
    for curve, field in RATES.items():
        history.add(curve, time_s, float(fields[field]), axis=TIME, width=RATE_WIDTH_S)


def _steps(history: History, folder: Path, newest: list[int]) -> Iterator[Told]:
    for line in _lines(folder / "steps.jsonl"):
        try:
            step, loss, staleness = int(line["step"]), float(line["loss"]), float(line["staleness"])
            time_s, timeline = float(line["time"]), int(line["timeline"])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        back = newest not in ([], [timeline])
        newest[:] = [timeline]

        def tell(step: int = step, loss: float = loss, staleness: float = staleness, back: bool = back) -> None:
            if back:
                # The run was rolled back to this step, or continued from it.
                history.forget(step)
            history.add("loss", step, loss)
            history.add("staleness", step, staleness)

        yield time_s, tell


def _evaluations(history: History, folder: Path) -> Iterator[Told]:
    for line in _lines(folder / "events.jsonl"):
        if line.get("kind") != "evaluation":
            continue
        try:
            step, time_s = int(line["step"]), datetime.fromisoformat(line["time"]).timestamp() + EVENT_S
            metrics = {str(name): float(value) for name, value in line["metrics"].items()}
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue

        def tell(step: int = step, metrics: dict[str, float] = metrics) -> None:
            for name, value in metrics.items():
                history.add(f"evaluation/{name}", step, value)

        yield time_s, tell


def _rates(history: History, folder: Path) -> Iterator[Told]:
    for line in _lines(folder / "rates.jsonl"):
        try:
            time_s = float(line["time"])
            found = {field: float(line[field]) for field in RATES.values()}
        except (KeyError, TypeError, ValueError, OverflowError):
            continue

        def tell(time_s: float = time_s, found: dict[str, float] = found) -> None:
            add_rates(history, time_s, found)

        yield time_s, tell


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; a line cut short by a crash is skipped."""
    for text in _texts(path):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _texts(path: Path) -> Iterator[bytes]:
    """The lines of a file; if it has more than READ_BYTES, only the lines within evenly spread pieces."""
    try:
        file = files.open_binary(path)
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if size <= READ_BYTES:
            yield from file.read(READ_BYTES).splitlines()
            return
        count = READ_BYTES // PIECE_BYTES
        for number in range(count):
            # Read one byte earlier, to see whether a line begins at the start; the last piece ends with the file.
            start = number * (size - PIECE_BYTES) // (count - 1)
            file.seek(max(0, start - 1))
            first, *lines = file.read(PIECE_BYTES + (start > 0)).split(b"\n")
            yield from [first, *lines][number > 0 : None if number == count - 1 else -1]
