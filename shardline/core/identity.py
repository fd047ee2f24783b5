"""Who a message is from: one life of a task."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Identity:
    """One life of a task, as the chief admitted it."""

    task: str
    """Such as "worker/3"."""
    incarnation: int = 0
    """term << 32 | counter; anybody may know it."""
    secret: bytes = field(default=b"", repr=False)
    """What the chief gave to this life alone; empty without a chief. Who lacks it can't speak for the task."""
