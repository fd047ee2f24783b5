"""Lanes: how the bytes of pushes and pulls travel; the table of what exists. See docs/lanes.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.lanes.cuda.lane import Cuda
from shardline.lanes.grpc.lane import Grpc
from shardline.lanes.kind import LaneKind
from shardline.lanes.shm.lane import Shm
from shardline.lanes.tcp.lane import Tcp
from shardline.seams import Table

if TYPE_CHECKING:
    import torch

LANES: Table[LaneKind] = Table("lane", Grpc, Tcp, Shm, Cuda)
"""From the lane that always works to the fastest: a lane that can't be used falls back to those before it."""
AUTO = "auto"
CHOICES = (AUTO, *(kind.name for kind in LANES.declared))
"""Values of --lane, without lanes of plugins."""
OPENED = tuple(sorted(kind.name for kind in LANES.declared if kind.opened))
"""Lanes that a worker has to open, and that may fall back to another."""


def choices() -> tuple[str, ...]:
    """Values of --lane. Raises UsageError for a plugin that fails."""
    return (AUTO, *LANES.names)


def candidates(choice: str, *, local: bool, device: torch.device | None = None) -> tuple[LaneKind, ...]:
    """Lanes to try for --lane, in order. local, device: see LaneKind.suits()."""
    kinds = [LANES.parse(name) for name in LANES.names]
    if choice == AUTO:
        kinds = [kind for kind in kinds if kind.suits(local=local, device=device)]
    else:
        kinds = kinds[: LANES.names.index(choice) + 1]
    return tuple(reversed(kinds))


def offered(choice: str) -> tuple[LaneKind, ...]:
    """Lanes that a server with this --lane lets workers open."""
    kinds = [LANES.parse(name) for name in LANES.names]
    return tuple(kind for kind in kinds if kind.opened and choice in (AUTO, kind.name))
