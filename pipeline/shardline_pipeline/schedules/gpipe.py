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
