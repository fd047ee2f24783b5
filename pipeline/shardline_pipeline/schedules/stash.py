"""PipeDream: each stage uses the newest parameters it has, and stashes them for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.layout import StageLayout
from shardline_pipeline.schedules.asynchronous import Stashing, newest


@dataclass(frozen=True)
class Stash(Stashing):
    """No flush; each stage computes with its newest parameters, which it stashes for the backward pass.

    Narayanan et al.: PipeDream (2019), section 3.3, weight stashing. With one microbatch per step, step t of stage s of
    n uses version max(0, t - (n - 1 - s)), so stages differ by one step each, and the last one is never stale.
    """

    name: ClassVar[str] = "stash"

    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        return newest(number, stage, layout, first)
