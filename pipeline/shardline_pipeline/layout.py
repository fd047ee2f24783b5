"""How many workers each stage of a pipeline has, and which microbatches each of them computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

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
