"""Curves in a service of another library, such as Weights & Biases, beside TensorBoard: --tracker NAME.

A package has it under its name in the entry points "shardline.trackers": a function (TrackedRun) -> Tracker. It is
called in a thread of its own, so neither a slow service nor a library's own waiting holds the chief up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardline import plugins
from shardline.config import TRACKERS
from shardline.core.points import Point, TrackedRun
from shardline.core.spec import JobSpec

QUEUED = 100_000
"""Values that wait for the service; later ones are dropped."""
BATCH = 1000
END_S = 30.0
"""How long the chief's end waits for the last values to arrive."""


class Tracker(Protocol):
    """Where values go. Used by one thread."""

    def write(self, points: Sequence[Point]) -> None:
        """Take values. Raises what the library raises."""

    def close(self) -> None:
        """The run has ended."""


def tracker_named(name: str) -> Callable[[TrackedRun], Tracker]:
    """Find what makes the tracker of this name. Raises UsageError if no installed package has it."""
    make: Callable[[TrackedRun], Tracker] = plugins.installed(TRACKERS, name, f"the tracker {name!r}")
    return make


class TrackerThread:
    """Hands values to a tracker. Its methods return at once, but for close()."""

    def __init__(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self.name = name
        self.problem = ""
        """Why nothing arrives any more, or is missing; told once by whoever reads it."""
        self._queue: queue.Queue[Point | None] = queue.Queue(QUEUED)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make, run), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, name: str, value: float, step: int) -> None:
        if self._ended.is_set():
            return
        try:
            self._queue.put_nowait(Point(name, value, step, time.time()))
        except queue.Full:
            self.problem = f"tracker {self.name} is slower than the job: values are missing there"

    def close(self) -> None:
        """Hand over what is left; waits END_S for room, and END_S for the last value, at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=END_S)
        if not self._ended.wait(END_S):
            self.problem = f"tracker {self.name} did not take the last values within {END_S:.0f} s: they are missing"

    def _run(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        try:
            tracker = make(run)
            goes_on = True
            while goes_on:
                points: list[Any] = [self._queue.get()]
                while len(points) < BATCH and not self._queue.empty():
                    points.append(self._queue.get_nowait())
                goes_on = points[-1] is not None
                tracker.write([point for point in points if point is not None])
            tracker.close()
        except BaseException as error:
            self.problem = f"tracker {self.name} takes no more values ({type(error).__name__}: {error})"
        finally:
            self._ended.set()


class Trackers:
    """All trackers of a run, open from its beginning."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._open: list[TrackerThread] = []

    def begin(self, out: Path, job: JobSpec | None) -> None:
        """Open them, once. Raises UsageError for a name that no installed package has."""
        if job is not None and not self._open:
            run = TrackedRun(out, job.name, {**job.settings(), "optimizer": job.rule.name})
            self._open = [TrackerThread(name, tracker_named(name), run) for name in self._names]

    def put(self, name: str, value: float, step: int) -> None:
        for tracker in self._open:
            tracker.put(name, value, step)

    def close(self) -> None:
        for tracker in self._open:
            tracker.close()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Name of each that has a new problem, and a sentence."""
        for tracker in self._open:
            if problem := tracker.problem:
                tracker.problem = ""
                yield tracker.name, problem
