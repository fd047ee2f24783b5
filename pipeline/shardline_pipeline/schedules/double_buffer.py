"""PipeDream-2BW: every step is computed with the parameters of the step before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shardline.errors import JobError
from shardline_pipeline.layout import StageLayout
from shardline_pipeline.schedules.asynchronous import Stashing


@dataclass(frozen=True)
class DoubleBuffer(Stashing):
    """No flush; each step is computed with the parameters of the step before, so two versions are enough.

    Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training (2021), section 3.1, PipeDream-2BW:
    w(t+1) = w(t) - lr * grad f(w(t-1)), in every stage. A worker needs at least as many microbatches of a step as it is
    ahead: n - 1 with a worker for each stage.
    """

    name: ClassVar[str] = "double-buffer"

    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        return max(first, layout.step(number) - 1)

    def check(self, layout: StageLayout) -> None:
        each = [layout.replicas // workers for workers in layout.workers]
        least = max(math.ceil(layout.ahead(stage) / replicas) for stage, replicas in enumerate(each))
        if layout.microbatches < least:
            raise JobError(
                f"pipeline {self} keeps two versions of the parameters, which takes at least {least} microbatches "
                f"per step for {layout.stages} stages, but accumulate is {layout.microbatches}; choose "
                f"accumulate={least} or more, or pipeline='stash'"
            )
