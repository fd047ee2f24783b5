"""ClockOffsets of other machines: how far each is from this one's."""

from __future__ import annotations

from collections.abc import Hashable

DRIFT = 1e-4
"""Seconds per second by which two clocks may run apart; quartz clocks stay below 1e-4."""


class ClockOffsets:
    """Offsets of senders' clocks, from messages that say when they were sent.

    A message arrives later than the sender's clock says by the offset and the time it took. The quickest message is the
    best measurement: on a local network it takes well below a millisecond, and about as long from every sender. Older
    measurements are trusted less, by DRIFT.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[float, float]] = {}
        """Offset, and when it was measured."""

    def heard(self, sender: Hashable, sent_s: float, now_s: float) -> float:
        """Take in a message; returns what has to be added to the sender's clock to get this one's."""
        offset_s = now_s - sent_s
        if sender in self._known:
            before_s, at_s = self._known[sender]
            offset_s = min(offset_s, before_s + DRIFT * (now_s - at_s))
        self._known[sender] = offset_s, now_s
        return offset_s

    def of(self, sender: Hashable) -> float | None:
        """What heard() has returned last; None if it was never called."""
        known = self._known.get(sender)
        return known[0] if known is not None else None

    def keep(self, senders: set[Hashable]) -> None:
        self._known = {sender: known for sender, known in self._known.items() if sender in senders}
