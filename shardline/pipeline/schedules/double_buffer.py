"""PipeDream-2BW: every step is computed with the parameters of the step before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.errors import JobError
from shardline.pipeline.schedules.unbroken import Stashing


@dataclass(frozen=True)
class DoubleBuffer(Stashing):
    """No flush; each step is computed with the parameters of the step before, so two versions are enough.

    Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training (2021), section 3.1, PipeDream-2BW:
    w(t+1) = w(t) - lr * grad f(w(t-1)), in every stage. A step needs at least n - 1 microbatches.
    """

    name: ClassVar[str] = "double-buffer"

    def version(self, microbatch: int, stage: int, stages: int, microbatches: int, *, first: int = 0) -> int:
        """See PipelineSchedule.version."""
        return max(first, microbatch // microbatches - 1)

    def check(self, stages: int, microbatches: int) -> None:
        """See PipelineSchedule.check."""
        if microbatches < stages - 1:
            raise JobError(
                f"pipeline {self} keeps two versions of the parameters, which takes at least {stages - 1} microbatches "
                f"per step for {stages} stages, but accumulate is {microbatches}; choose accumulate={stages - 1} or "
                "more, or pipeline='stash'"
            )
