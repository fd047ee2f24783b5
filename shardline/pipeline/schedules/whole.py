from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.pipeline.base import Pass, PipelineSchedule


@dataclass(frozen=True)
class WholeModel(PipelineSchedule):
    """Every worker computes the whole model."""

    name: ClassVar[str] = "whole-model"

    @property
    def staged(self) -> bool:
        return False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        return [Pass(number, back) for number in range(microbatches) for back in (False, True)]
