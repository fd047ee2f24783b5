"""Messages of a wait that may take minutes: what it waits for, and the time left. Pure; the clock is an argument."""

from __future__ import annotations

import math

FIRST_S = 1.0
"""A shorter wait logs nothing, if it doesn't have to."""
EVERY_S = 10.0


def duration(seconds: float) -> str:
    """A length of time to the second: "45 s", "9 min 20 s"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Waiting:
    """One wait, from now_s to deadline_s; infinity = no deadline of its own."""

    def __init__(self, now_s: float, deadline_s: float = math.inf, *, first_s: float = FIRST_S) -> None:
        self.deadline_s = deadline_s
        self._next_s = now_s + first_s
        self._told_why = False

    def sentence(self, now_s: float, whom: str, why: str = "") -> str:
        """The message to log now; empty while the last one is recent. The first reason is returned at once."""
        if now_s < self._next_s and (self._told_why or not why):
            return ""
        self._next_s, self._told_why = now_s + EVERY_S, bool(why)
        text = f"waiting for {whom}"
        if self.deadline_s < math.inf:
            text += f", {duration(self.deadline_s - now_s)} left"
        return f"{text}: {why}" if why else text

    def pause_s(self, now_s: float) -> float:
        """Seconds until the next message is due, or the deadline."""
        return max(0.0, min(self._next_s, self.deadline_s) - now_s)
