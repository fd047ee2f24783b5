"""The virtual clock: events in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """Runs events one after another; time passes only between them. Events at the same time run in order of entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stopped = False
        """Set by an event to end run()."""
        self._entered = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call act(*arguments) at a time that has not passed."""
        self._entered += 1
        heapq.heappush(self._events, (when_s, self._entered, act, arguments))

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """The same, in seconds from now. Without a delay it is called at once."""
        if delay_s > 0.0:
            self.at(self.now_s + delay_s, act, *arguments)
        else:
            act(*arguments)

    def run(self) -> None:
        """Run until an event stops the clock or none is left."""
        events, pop = self._events, heapq.heappop
        while events and not self.stopped:
            self.now_s, _, act, arguments = pop(events)
            act(*arguments)
