"""The origin of an update: what a rule may need besides the gradient."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PushContext:
    """The pusher and its base version. The default is an update that several workers made together."""

    task: str = ""
    """Such as "worker/3"; empty for an update of several workers."""
    incarnation: int = 0
    """Incarnation of that task."""
    base_version: int | None = None
    """Lowest version of the values from which the gradient was computed; None if it follows from the step."""
    staleness: int = 0
    """Number of updates by others between that version and this one."""
    clock: int = 0
    """The pushing worker's clock: steps or rounds that it has finished."""


TOGETHER = PushContext()
"""For an update that all contributors made together."""
