"""What a simulation has counted, and its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardline.core.status import StageStatus


@dataclass
class RunCounts:
    step_ends_s: list[float] = field(default_factory=list)
    push_bytes: float = 0.0
    pull_bytes: float = 0.0
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(virtual seconds, loss) of each contribution."""
    traffic: list[tuple[float, int, int]] = field(default_factory=list)
    """After each step: bytes so far, pushes that count, and the sum of their staleness."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of a simulation. Times are virtual seconds."""

    step_ends_s: tuple[float, ...]
    """When each step of the job was done."""
    passes: int
    """Forward and backward passes that workers have done."""
    passes_used: int
    """Those whose gradients count: not what came too late, nor what was under way at the end."""
    staleness: float
    """Mean over all pushes that count, in updates."""
    staleness_max: int
    push_bytes: float
    """Of all workers, during the whole job."""
    pull_bytes: float
    computing: float
    """Share of all workers' time in which they computed."""
    traffic: tuple[tuple[float, int, int], ...]
    """After each step: bytes of all workers so far, pushes that count, and the sum of their staleness."""
    parcel_bytes: float = 0.0
    """Of activations and their gradients between the stages of a pipeline."""
    stages: tuple[StageStatus, ...] = ()
    """Of a pipeline, over its last steps."""
    losses: tuple[tuple[float, float], ...] = ()
    """(virtual seconds, loss) of each contribution when it is begun; empty without gradients."""

    @property
    def steps(self) -> int:
        return len(self.step_ends_s)

    @cached_property
    def step_s(self) -> npt.NDArray[np.float64]:
        """Seconds of each step, from the previous one's end: shape [steps]."""
        return np.diff(np.array(self.step_ends_s), prepend=0.0)

    @property
    def seconds(self) -> float:
        return self.step_ends_s[-1]

    @property
    def passes_per_s(self) -> float:
        """Passes per second whose gradients count, over the whole job."""
        return self.passes_used / self.seconds

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds

    def figures(self) -> dict[str, Any]:
        """All figures, for JSON. The same setup gives the same ones."""
        p50, p95 = np.quantile(self.step_s, (0.5, 0.95))
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "steps_per_s": self.steps_per_s,
            "step_s": {"mean": float(self.step_s.mean()), "median": float(p50), "p95": float(p95)},
            "passes_per_s": self.passes_per_s,
            "passes_unused": max(0.0, 1.0 - self.passes_used / self.passes),
            "staleness": {"mean": self.staleness, "max": self.staleness_max},
            "bytes_per_step": {"push": self.push_bytes / self.steps, "pull": self.pull_bytes / self.steps}
            | ({"parcels": self.parcel_bytes / self.steps} if self.stages else {}),
            "computing": self.computing,
            **({"stages": [asdict(stage) for stage in self.stages]} if self.stages else {}),
            **({"loss": {"first": self.loss(0), "last": self.loss(-1)}} if self.losses else {}),
        }

    def loss(self, part: int) -> float:
        """Mean loss of the first (part 0) or last (part -1) tenth of the contributions."""
        count = max(1, len(self.losses) // 10)
        chosen = self.losses[:count] if part == 0 else self.losses[-count:]
        return sum(loss for _, loss in chosen) / count
