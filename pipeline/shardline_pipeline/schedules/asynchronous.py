"""Pipelines without a flush: stages begin the next steps while this one is on its way back. Pure."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardline.errors import JobError
from shardline_pipeline.base import Pass, PipelineSchedule, StageLayout, UnitProgress
from shardline_pipeline.schedules.flushed import Flush


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


@dataclass(frozen=True)
class Stash(Stashing):
    """No flush; each stage computes with its newest parameters, which it stashes for the backward pass.

    Narayanan et al.: PipeDream (2019), section 3.3, weight stashing. With one microbatch per step, step t of stage s of
    n uses version max(0, t - (n - 1 - s)), so stages differ by one step each, and the last one is never stale.
    """

    name: ClassVar[str] = "stash"

    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        return newest(number, stage, layout, first)


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


@dataclass(frozen=True)
class FTPipe(OneVersion):
    """No flush and one version: backward passes first repeat their forward passes, with the newest parameters.

    Eliad et al.: Fine-tuning giant neural networks on commodity hardware (FTPipe, 2021), asynchronous pipelines with
    recomputation. A stage keeps of a microbatch only what came in, and no older version. Each gradient is right for its
    stage; stale is what came in, which the stages before have made with the parameters that they had then.

    predict: forward passes use the parameters that the backward pass will find, as far as the optimizer's state tells:
    see Stashing.
    """

    name: ClassVar[str] = "ftpipe"
    predict: bool = False

    @property
    def recompute(self) -> bool:
        return True


@dataclass(frozen=True)
class NoStash(OneVersion):
    """A negative example only: backward passes use newer parameters than their forward passes, so no gradient is right.

    Narayanan et al.: PipeDream (2019), section 3.3, has it to show what stashing is for. Each stage computes forward
    with its newest parameters, as in Stash; those that arrive meanwhile overwrite what autograd has kept of them.
    """

    name: ClassVar[str] = "no-stash"
    warning: ClassVar[str] = (
        "pipeline no-stash is a negative example: its backward passes use other parameters than their forward passes, "
        "so what it trains with is the gradient of nothing; choose pipeline='stash' or 'ftpipe' to train"
    )
