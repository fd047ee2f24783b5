"""The result of a rule for a push: an outcome and the reason, for logs and for the worker."""

from __future__ import annotations

import enum

from shardline.core.fixed import fixed

PROTOCOL_MINOR = 1
FEATURES = ("sync", "async", "voted", "cut", "restore")


class Outcome(enum.Enum):
    """Outcome of a push or a pull; the names of proto Outcome."""

    COUNTED = 1
    STAGED = 2
    APPLIED = 3
    DUPLICATE = 4
    LATE_DROPPED = 5
    SKIPPED = 6
    SPLIT = 7
    OUT_OF_SEQUENCE = 8
    WRONG_TIMELINE = 9
    FENCED = 10
    NOT_CONFIGURED = 11
    STOPPED = 12
    REFUSED = 13
    SERVED = 14
    OVERTAKEN = 15
    WAITING = 16

    # As cheap as that of any object; Enum's own calls a function of Python for each look into a table.
    __hash__ = object.__hash__


@fixed()
class Decision:
    """An outcome and its reason. `reason` is a sentence for the user, empty if the outcome is clear by itself."""

    outcome: Outcome
    reason: str = ""
    mismatch: bool = False
    """DUPLICATE: the repetition has other bits than the contribution that counts."""


SERVED, COUNTED = Decision(Outcome.SERVED), Decision(Outcome.COUNTED)
"""What is decided in almost every step."""
