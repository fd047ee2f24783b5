"""Interface of pipelines: in which order a stage computes the passes of a step. Pure."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from shardline.division import Division, DivisionChoice, of_parts
from shardline_pipeline.hosts import Hosts


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The size of a job's pipeline, as the job declares it: who computes a stage in the end changes no count.

    Microbatches are numbered over all replicas: the k-th of replica r has number k * replicas + r. The workers of a
    stage take them in turn (1F1B-RR; Narayanan et al.: PipeDream, 2019, section 3.2), so each has every so-manyth one,
    and place() says which of its own a microbatch is.
    """

    workers: tuple[int, ...]
    """Of each stage; each divides the replicas."""
    microbatches: int
    """Of one replica's step."""
    replicas: int = 1

    @classmethod
    def of(cls, hosts: Hosts, stages: int, replicas: int, microbatches: int) -> StageLayout:
        """That of a job. Where it doesn't name the workers, every replica is a pipeline of its own."""
        workers = tuple(len(one) for one in hosts) or (replicas,) * stages
        return cls(workers=workers, replicas=replicas, microbatches=microbatches)

    @classmethod
    def straight(cls, stages: int, microbatches: int) -> StageLayout:
        """One worker for each stage, and one replica."""
        return cls(workers=(1,) * stages, microbatches=microbatches)

    @property
    def stages(self) -> int:
        return len(self.workers)

    def number(self, microbatch: int, replica: int) -> int:
        """A microbatch's number. microbatch: counted from the first one of the job's replica."""
        return microbatch * self.replicas + replica

    def first(self, step: int) -> int:
        return step * self.microbatches * self.replicas

    def step(self, number: int) -> int:
        return number // (self.microbatches * self.replicas)

    def place(self, number: int, stage: int) -> int:
        """Which of its worker's microbatches, counted from the job's first one, this one is in a stage."""
        return number // self.workers[stage]

    def crew(self, replica: int, stage: int) -> int:
        return replica % self.workers[stage]

    def share(self, stage: int) -> int:
        """Microbatches of a step that one worker of a stage computes."""
        return self.microbatches * self.replicas // self.workers[stage]

    def ahead(self, stage: int) -> int:
        """Microbatches by which a worker's forward passes of a stage are ahead of its backward passes.

        1F1B fills the pipeline and keeps it full: with W workers from this stage on, r of them its own, floor((W - 1) /
        r), which is n - 1 - s with one each (PipeDream's runtime; in stage 0 one less than NOAM, ceil(W / r)).
        """
        return (sum(self.workers[stage:]) - 1) // self.workers[stage]

    def held(self, stage: int) -> int:
        """Largest number of microbatches of one replica that a stage holds; a worker of it holds ahead + 1 of all."""
        return 1 + self.ahead(stage) // (self.replicas // self.workers[stage])


@dataclass(frozen=True)
class Pass:
    """One microbatch through one stage, forward or backward."""

    microbatch: int
    back: bool = False


class UnitProgress(Protocol):
    """How far a replica is in a stage: its next forward and backward pass, counted from the job's first microbatch."""

    replica: int
    forward: int
    backward: int


class PipelineSchedule(DivisionChoice, abc.ABC):
    """How the stages of a model share a step. Every order computes microbatches in ascending order, each way.

    So gradients, and buffers that forward passes change, are those of the same microbatches on one process, to the bit.
    """

    staged: ClassVar[bool] = True
    """The model is cut into stages."""
    flushes: ClassVar[bool] = True
    """A step begins when the one before has ended in all stages, so that no parameter is stale."""
    keeps_one: ClassVar[bool] = False
    """A new version of a stage's parameters takes the memory of the last: see AsynchronousSchedule."""
    warning: ClassVar[str] = ""
    """A sentence for whoever starts a job with it."""

    def division(self, job: Any) -> Division:
        return of_parts(job)

    @property
    def predict(self) -> bool:
        """Whether passes use parameters as they will be: see Stashing."""
        return False

    @property
    def gap_aware(self) -> bool:
        """Whether gradients are divided by how far the parameters have moved since their passes: see Stashing."""
        return False

    @property
    def recompute(self) -> bool:
        """Whether a stage keeps of a microbatch only what came in, and repeats its forward pass to go back."""
        return False

    @abc.abstractmethod
    def passes(self, stage: int, stages: int, microbatches: int) -> Sequence[Pass]:
        """The passes of one step in one stage, 0 <= stage < stages, in order, if the pipeline is empty before it."""

    def version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        """Version of the parameters with which a stage computes a microbatch, forward, and mostly backward too.

        A version is the number of updates that the stage has had. number: see StageLayout. first: the step at which the
        pipeline was empty last.
        """
        return layout.step(number)

    def back_version(self, number: int, stage: int, layout: StageLayout, *, first: int = 0) -> int:
        """The same of the backward pass: the very parameters of the forward pass, unless the schedule keeps none."""
        return self.version(number, stage, layout, first=first)

    def held(self, stage: int, stages: int, microbatches: int) -> int:
        """Largest number of microbatches whose activations a stage holds at a time."""
        most = now = 0
        for one in self.passes(stage, stages, microbatches):
            now += -1 if one.back else 1
            most = max(most, now)
        return most

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
        """Which passes of a replica may follow in a stage, at most one each way, and whether they are backward passes.

        crew: all replicas of the same worker of the layout, this one included. step: the open one. steps: of the job.
        first: see version().
        """
        done = unit.forward + unit.backward - 2 * step * layout.microbatches
        order = self.passes(stage, layout.stages, layout.microbatches)
        if done < len(order):
            yield order[done].back

    def late(self, version: int, stage: int, layout: StageLayout, *, first: int = 0) -> set[int]:
        """How many updates after a version the gradients of its passes are applied, 0 included."""
        return {0}

    def check(self, layout: StageLayout) -> None:
        """Raise JobError if so many microbatches can't go through so many stages."""


def bubble(stages: int, microbatches: int) -> float:
    """Share of its time that a stage idles in a step with a flush, if all passes are equally long.

    (n - 1) / (m + n - 1) (Huang et al.: GPipe, 2019, section 2.3).
    """
    return (stages - 1) / (microbatches + stages - 1)
