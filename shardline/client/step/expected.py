"""What is known of a replica's part of a step before it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is known of a replica's part of a step before its last backward pass."""

    replica: int
    owned: Sequence[int]
    """Replicas that this worker contributes to the step."""
    samples: int = 0
    loss: float | None = None
    hyper: Callable[[], Mapping[int, Mapping[str, float]]] = dict
    """Numbers of parameter groups that travel with the push; asked when the first bucket leaves."""
