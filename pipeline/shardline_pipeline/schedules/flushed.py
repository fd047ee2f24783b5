"""Pipelines that drain at the end of each step, and the passes of a model that is not cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.base import Pass, PipelineSchedule


@dataclass(frozen=True)
class GPipe(PipelineSchedule):
    """Stages run all forward passes of a step, then all backward passes.

    Huang et al.: GPipe (2019), section 2.3: a stage holds the activations of all microbatches, or with `recompute` what
    came in for each.
    """

    name: ClassVar[str] = "gpipe"
    recompute: bool = False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        return [Pass(number, back) for back in (False, True) for number in range(microbatches)]


@dataclass(frozen=True)
class Flush(PipelineSchedule):
    """Stages alternate forward and backward passes, and drain at the end of each step.

    Narayanan et al.: Memory-Efficient Pipeline-Parallel DNN Training (2021), section 3.2, PipeDream-Flush. Stage s of n
    begins with n - 1 - s forward passes and never holds the activations of more than n - s microbatches; its bubble is
    GPipe's.
    """

    name: ClassVar[str] = "flush"
    recompute: bool = False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        ahead = min(stages - 1 - stage, microbatches)
        found = [Pass(number) for number in range(ahead)]
        for number in range(microbatches):
            if number + ahead < microbatches:
                found.append(Pass(number + ahead))
            found.append(Pass(number, back=True))
        return found


@dataclass(frozen=True)
class Undivided(PipelineSchedule):
    """The passes of a model that is not cut into stages."""

    name: ClassVar[str] = "undivided"
    staged: ClassVar[bool] = False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        return [Pass(number, back) for number in range(microbatches) for back in (False, True)]
