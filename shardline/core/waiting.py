"""A wait that may take minutes says for whom it is and how long it still goes on. Pure; the clock is an argument."""

from __future__ import annotations

import math

FIRST_S = 1.0
"""A wait that is over sooner says nothing, where it need not be."""
EVERY_S = 10.0


def duration(seconds: float) -> str:
    """A length of time to the second: "45 s", "9 min 20 s"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Waiting:
    """One wait, from now_s to deadline_s; infinity = others decide how long."""

    def __init__(self, now_s: float, deadline_s: float = math.inf, *, first_s: float = FIRST_S) -> None:
        self.deadline_s = deadline_s
        self._next_s = now_s + first_s
        self._told_why = False

    def sentence(self, now_s: float, whom: str, why: str = "") -> str:
        """What to say now; empty while the last sentence is fresh. The first reason is said at once."""
        if now_s < self._next_s and (self._told_why or not why):
            return ""
        self._next_s, self._told_why = now_s + EVERY_S, bool(why)
        text = f"waiting for {whom}"
        if self.deadline_s < math.inf:
            text += f", {duration(self.deadline_s - now_s)} left"
        return f"{text}: {why}" if why else text

    def pause_s(self, now_s: float) -> float:
        """Until the next sentence is due, or the deadline."""
        return max(0.0, min(self._next_s, self.deadline_s) - now_s)
