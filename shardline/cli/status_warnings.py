"""Which of the chief's events a terminal shows: warnings and errors, each kind at most once a minute."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.core.status import ChiefStatus

AGAIN_S = 60.0
_NUMBER = re.compile(r"\d+(\.\d+)?")


class StatusWarnings:
    """Selects from the chief's statuses what a launcher's terminal shows. Pure; the clock is an argument."""

    def __init__(self) -> None:
        self._until = 0.0
        """Unix time of the newest event seen."""
        self._shown_s: dict[str, float] = {}
        """When each message was last shown, by its text without numbers."""

    def of(self, status: ChiefStatus, now_s: float) -> list[str]:
        """New warnings and errors, without the reason for the job's end, which is shown at the end."""
        new = [event for event in status.said if event.time > self._until]
        self._until = max([self._until, *(event.time for event in new)])
        told = [event.sentence for event in new if event.level != "info" and event.sentence != status.reason]
        return [sentence for sentence in told if self._fresh(sentence, now_s)]

    def _fresh(self, sentence: str, now_s: float) -> bool:
        kind = _NUMBER.sub("#", sentence)
        if now_s - self._shown_s.get(kind, -AGAIN_S) < AGAIN_S:
            return False
        self._shown_s[kind] = now_s
        return True
