from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.base import Pass, PipelineSchedule


@dataclass(frozen=True)
class Undivided(PipelineSchedule):
    """The passes of a model that is not cut into stages."""

    name: ClassVar[str] = "undivided"
    staged: ClassVar[bool] = False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        return [Pass(number, back) for number in range(microbatches) for back in (False, True)]
