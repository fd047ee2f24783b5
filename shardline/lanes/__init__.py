"""Lanes: how the bytes of pushes and pulls travel; the table of what exists. See docs/lanes.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardline.errors import UsageError, nearest
from shardline.lanes.kind import LaneKind
from shardline.lanes.kinds import Cuda, Grpc, Shm, Tcp
from shardline.seams import Table

if TYPE_CHECKING:
    import torch

LANES: Table[LaneKind] = Table("lane", Grpc, Tcp, Shm, Cuda)
"""From the lane that always works to the fastest: a lane that can't be used falls back to those before it."""
AUTO = "auto"
CHOICES = (AUTO, *(kind.name for kind in LANES.declared))
"""Values of --lane, without lanes of plugins."""
OPENED = tuple(sorted(kind.name for kind in LANES.declared if kind is not Grpc))
"""Lanes that a worker has to open, and that may fall back to another; gRPC is always there, in the call."""


def choices() -> tuple[str, ...]:
    """Values of --lane. Raises UsageError for a plugin that fails."""
    return (AUTO, *LANES.names)


def check_choice(name: str) -> str:
    """The value of --lane. Raises UsageError if there is no such lane."""
    if name not in CHOICES and name not in choices():
        raise UsageError(f"--lane is {name!r}; it must be one of {', '.join(choices())}{nearest(name, choices())}")
    return name


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
    return tuple(kind for kind in kinds if kind.name != Grpc.name and choice in (AUTO, kind.name))
