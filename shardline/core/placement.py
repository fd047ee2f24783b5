"""Which parameter server holds what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which ps hosts a shard, and where it answers."""

    shard: int
    task: str
    address: str
    standby_task: str = ""
    """Which ps holds its standby, and where that answers; empty = it has none."""
    standby_address: str = ""
    appointment: int = 0
    """A new number for each standby that the shard gets; 0 = it has none, or the chief does not number them."""
