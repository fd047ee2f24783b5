"""Where an update comes from: what a rule may want to know besides the gradient."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PushContext:
    """Who pushed, and from what. The default is an update that several workers made together."""

    task: str = ""
    """Such as "worker/3"; empty if it is no single worker's."""
    incarnation: int = 0
    """Which life of that task."""
    base_version: int | None = None
    """Lowest version of the values that the gradient was computed on; None if it follows from the step."""
    staleness: int = 0
    """Updates by others between that version and this one."""
    clock: int = 0
    """Of the worker that pushed: steps or rounds that it has finished."""


TOGETHER = PushContext()
"""Of an update that all contributors made together."""
