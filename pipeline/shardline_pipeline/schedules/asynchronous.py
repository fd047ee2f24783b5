"""Pipelines without a flush: stages begin the next steps while this one is on its way back. Pure."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.base import Pass, PipelineSchedule, UnitProgress
from shardline_pipeline.layout import StageLayout
from shardline_pipeline.schedules.flush import Flush


def newest(number: int, stage: int, layout: StageLayout, first: int) -> int:
    """The newest version that a stage has when it computes a microbatch forward: PipeDream (2019), section 3.3.

    Its worker has then gone back with all its microbatches but those that it is ahead.
    """
    return max(first, (layout.place(number, stage) - layout.ahead(stage)) // layout.share(stage))


@dataclass(frozen=True)
class AsynchronousSchedule(PipelineSchedule, abc.ABC):
    """1F1B that never drains, so that no stage idles once the pipeline is full; parameters are stale instead.

    keeps_one: the last backward pass of a step waits until all forward passes with its version are done, see follows(),
    since the next one takes its place. Else a backward pass uses the very parameters of its forward pass, and a worker
    keeps several versions.
    """

    flushes: ClassVar[bool] = False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        """See PipelineSchedule.passes: a step with none after it drains."""
        return Flush().passes(stage, stages, microbatches)

    @abc.abstractmethod
    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int: ...

    def follows(
        self,
        unit: UnitProgress,
        crew: Iterable[UnitProgress],
        stage: int,
        layout: StageLayout,
        *,
        step: int,
        steps: int,
        first: int = 0,
    ) -> Iterator[bool]:
        """See PipelineSchedule.follows.

        A worker goes back with the microbatches of its replicas in order, and is never further ahead of them than the
        layout says.
        """
        ahead, end, all_ = layout.ahead(stage), (step + 1) * layout.share(stage), steps * layout.microbatches
        forward, backward = (
            layout.place(layout.number(one, unit.replica), stage) for one in (unit.forward, unit.backward)
        )
        oldest = min(layout.place(layout.number(one.backward, one.replica), stage) for one in crew)
        if oldest >= end:
            return
        if forward - oldest <= ahead and unit.forward < all_:
            yield False
        if backward == oldest and unit.backward < unit.forward:
            # Of a schedule that keeps one version, the next one takes its place after the last backward pass.
            nexts = [(one.forward, layout.number(one.forward, one.replica)) for one in crew]
            if (
                not self.keeps_one
                or backward < end - 1
                or all(own >= all_ or self.version(number, stage, layout, first=first) > step for own, number in nexts)
            ):
                yield True

    def late(self, version: int, stage: int, layout: StageLayout, *, first: int = 0) -> set[int]:
        span = range(layout.first(version), layout.first(version + 2) + 2 * sum(layout.workers))
        own = [number for number in span if self.version(number, stage, layout, first=first) == version]
        return {layout.step(number) - version for number in own}


@dataclass(frozen=True)
class OneVersion(AsynchronousSchedule, abc.ABC):
    """A stage computes forward with its newest parameters, and back with those of the step."""

    keeps_one: ClassVar[bool] = True

    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        return newest(number, stage, layout, first)

    def back_version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        return layout.step(number)


@dataclass(frozen=True)
class Stashing(AsynchronousSchedule, abc.ABC):
    """A backward pass uses the very parameters of its forward pass.

    predict: compute each pass with the parameters that its version will have become when the gradient is applied, as
    far as the optimizer's state tells: those after as many of its steps without a gradient. For SGD with momentum this
    is w - lr * (m - m^(s+1)) / (1 - m) * v (Eliad et al.: FTPipe, 2021, weight prediction); schedules, weight decay and
    Adam's moments are the optimizer's own.

    gap_aware: divide each microbatch's gradient, before it is added to the others of its step, by 1 + the distance of
    the parameters that it changes from those that its passes used, in average steps (FTPipe; see
    shardline_pipeline.schedules.gaps).
    """

    predict: bool = False
    gap_aware: bool = False
    recompute: bool = False
