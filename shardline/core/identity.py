"""The sender of a message: one incarnation of a task."""

from __future__ import annotations

from dataclasses import field

from shardline.core.fixed import fixed


@fixed()
class Identity:
    """One incarnation of a task, as admitted by the chief."""

    task: str
    """Such as "worker/3"."""
    incarnation: int = 0
    """term << 32 | counter; not secret."""
    secret: bytes = field(default=b"", repr=False)
    """Given by the chief to this incarnation only; empty without a chief. Without it, nobody can speak for the task."""
