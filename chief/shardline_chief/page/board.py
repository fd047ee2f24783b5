"""What the page shows now: written by the control thread, read by the page's event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Protocol

from shardline import plugins
from shardline.core.orders import PassReport
from shardline.core.spec import JobSpec
from shardline.core.status import ChiefStatus, StageStatus
from shardline.observability.view import as_json, cluster_view
from shardline_chief.page.history import History


class Passes(Protocol):
    """Thread-safe: the control thread writes, the page's thread reads."""

    def heard(
        self, job: JobSpec, life: tuple[str, int], passes: Sequence[PassReport], *, sent_s: float, now_s: float
    ) -> None:
        """Take in what one heartbeat says. life: task and incarnation. sent_s: when it was sent, on the clock of its
        passes; now_s: on this one.
        """
        ...

    def read(self, job: JobSpec, trace: Mapping[str, Any]) -> None:
        """Take in the passes of a trace file."""
        ...

    def figures(self) -> tuple[StageStatus, ...]:
        """Each stage over the recent steps; none without a pipeline, and before its first step is done."""
        ...

    def recent(self) -> str:
        """The newest whole steps as JSON for the page."""
        ...

    def trace(self) -> dict[str, Any] | None:
        """All passes that are kept, as a trace; None without a pipeline."""
        ...


def passes() -> Passes:
    found: Passes = plugins.installed("shardline.boards", "passes", "a page of passes")()
    return found


class Board:
    """The newest status, converted to JSON on demand, and the readers that wait for a newer one."""

    def __init__(self, history: History, runs: Mapping[str, History] | None = None) -> None:
        """runs: where several are shown, the curves of each by its name; first those of `history`."""
        self._history = history
        self._runs = runs or {}
        self.passes = passes()
        """Of a pipeline."""
        self._lock = threading.Lock()
        self._status = ChiefStatus()
        self._written: float | None = None
        self.number = 0
        """Number of the newest status; 0 = none yet."""
        self._loop: asyncio.AbstractEventLoop | None = None
        # Used only on the loop's thread.
        self._waiting: set[asyncio.Event] = set()
        self._view: tuple[int, str] = (-1, "")
        self._changes: tuple[int, str, dict[str, Any]] = (-1, "", {})

    # The control thread

    def show(self, status: ChiefStatus, written: float | None = None) -> None:
        """Set a newer status; costs the caller next to nothing. written: see ClusterView."""
        with self._lock:
            self._status, self._written = status, written
            self.number += 1
            loop = self._loop
        if loop is not None:
            self._call(loop)

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(self.wake)
        except RuntimeError:
            # The page has been closed; nobody is waiting any more.
            self.bind(None)

    # The page's loop

    def bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Set the loop whose waiters are to be woken; None: no loop."""
        with self._lock:
            self._loop = loop

    def view(self) -> str:
        """The newest status, as the JSON text of a ClusterView."""
        with self._lock:
            status, written, number = self._status, self._written, self.number
        if self._view[0] != number:
            found = as_json(cluster_view(status, written))
            self._view = (number, json.dumps(found, allow_nan=False, separators=(",", ":")))
        return self._view[1]

    def changes(self, cursor: str) -> dict[str, Any]:
        """What changed in the curves since a cursor; readers with the same cursor share one answer per status."""
        if self._changes[:2] != (self.number, cursor):
            self._changes = (self.number, cursor, self._since(cursor))
        return self._changes[2]

    def _since(self, cursor: str) -> dict[str, Any]:
        """A cursor is that of each run, with dots between them."""
        own, *others = cursor.split(".")
        news = self._history.since(own)
        if self._runs:
            news["run"], *names = self._runs
            beside = {
                name: self._runs[name].since(at) for name, at in zip(names, chain(others, repeat("")), strict=False)
            }
            news["cursor"] = ".".join([news["cursor"], *(part.pop("cursor") for part in beside.values())])
            news["beside"] = beside
        return news

    async def newer(self, number: int, timeout_s: float) -> bool:
        """Wait for a status after that number, or for wake(); False on timeout. timeout_s: seconds."""
        if self.number > number:
            return True
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(event)
        return True

    def wake(self) -> None:
        for event in self._waiting:
            event.set()
