"""A replica's part of a step before it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Facts about a replica's part of a step that are known before its last backward pass."""

    replica: int
    owned: Sequence[int]
    """Replicas for which this worker contributes to the step."""
    samples: int = 0
    loss: float | None = None
    hyper: Callable[[], Mapping[int, Mapping[str, float]]] = dict
    """Hyper-parameters sent with the push, by group; called when the first bucket leaves."""
