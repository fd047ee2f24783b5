"""PipeDream with vertical sync: all stages use the parameters of the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.layout import StageLayout
from shardline_pipeline.schedules.asynchronous import Stashing, newest


@dataclass(frozen=True)
class VerticalSync(Stashing):
    """No flush; all stages compute a microbatch with parameters of the same step, the newest that all have.

    It is the newest that stage 0 has when the microbatch enters.

    Narayanan et al.: PipeDream (2019), section 3.3, vertical sync. With one microbatch per step this is SGD with
    gradients n - 1 steps old: w(t+1) = w(t) - lr * grad f(w(t-n+1)).
    """

    name: ClassVar[str] = "vertical-sync"

    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        return newest(number, 0, layout, first)
