"""Pipelines without a flush: stages begin the next steps while this one is on its way back. Pure."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.pipeline.base import Pass, PipelineSchedule
from shardline.pipeline.schedules.flush import Flush


def ahead(stage: int, stages: int) -> int:
    """Microbatches by which a stage's forward passes are ahead of its backward passes.

    Narayanan et al.: PipeDream (2019), section 3.2: 1F1B fills the pipeline and keeps it full.
    """
    return stages - 1 - stage


def newest(microbatch: int, stage: int, stages: int, microbatches: int, first: int) -> int:
    """The newest version that a stage has when it computes a microbatch forward: PipeDream (2019), section 3.3."""
    return max(first, (microbatch - ahead(stage, stages)) // microbatches)


@dataclass(frozen=True)
class Unbroken(PipelineSchedule, abc.ABC):
    """1F1B that never drains, so that no stage idles once the pipeline is full; parameters are stale instead."""

    @property
    def predict(self) -> bool:
        """Whether passes use parameters as they will be: see Stashing."""
        return False

    @property
    def keeps_one(self) -> bool:
        """Whether a stage keeps one version of its parameters, so that a new one takes the place of the last.

        So the last backward pass of a step waits until all forward passes with its version are done, see ends(). Else a
        backward pass uses the very parameters of its forward pass, and a worker keeps several versions.
        """
        return False

    @property
    def flushes(self) -> bool:
        """See PipelineSchedule.flushes."""
        return False

    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        """See PipelineSchedule.passes: a step with none after it drains."""
        return Flush().passes(stage, stages, microbatches)

    @abc.abstractmethod
    def version(self, microbatch: int, stage: int, stages: int, microbatches: int, *, first: int = 0) -> int:
        """See PipelineSchedule.version."""

    def ends(self, forward: int, step: int, stage: int, stages: int, microbatches: int, *, first: int = 0) -> bool:
        """See PipelineSchedule.ends."""
        return not self.keeps_one or self.version(forward, stage, stages, microbatches, first=first) > step

    def late(self, version: int, stage: int, stages: int, microbatches: int, *, first: int = 0) -> set[int]:
        """How many updates after a version the gradients of its passes are applied, 0 included."""
        span = range(version * microbatches, (version + stages) * microbatches)
        own = [n for n in span if self.version(n, stage, stages, microbatches, first=first) == version]
        return {number // microbatches - version for number in own}

    def versions(self, stage: int, stages: int, microbatches: int) -> int:
        """Largest number of versions of its parameters that a stage uses at a time, in a full pipeline."""
        if self.keeps_one:
            return 1
        most = 0
        for oldest in range(stages * microbatches, (stages + 1) * microbatches):
            span = range(oldest, oldest + ahead(stage, stages) + 1)
            most = max(most, len({self.version(one, stage, stages, microbatches) for one in span}))
        return most


@dataclass(frozen=True)
class OneVersion(Unbroken, abc.ABC):
    """A stage computes forward with its newest parameters, and back with those of the step."""

    @property
    def keeps_one(self) -> bool:
        """See Unbroken.keeps_one."""
        return True

    def version(self, microbatch: int, stage: int, stages: int, microbatches: int, *, first: int = 0) -> int:
        """See PipelineSchedule.version."""
        return newest(microbatch, stage, stages, microbatches, first)

    def back_version(self, microbatch: int, stage: int, stages: int, microbatches: int, *, first: int = 0) -> int:
        """See PipelineSchedule.back_version: that of the step."""
        return microbatch // microbatches


@dataclass(frozen=True)
class Stashing(Unbroken, abc.ABC):
    """A backward pass uses the very parameters of its forward pass.

    predict: compute each pass with the parameters that its version will have become when the gradient is applied, as
    far as the optimizer's state tells: those after as many of its steps without a gradient. For SGD with momentum this
    is w - lr * (m - m^(s+1)) / (1 - m) * v (Eliad et al.: FTPipe, 2021, weight prediction); schedules, weight decay and
    Adam's moments are the optimizer's own.
    """

    predict: bool = False
    recompute: bool = False
