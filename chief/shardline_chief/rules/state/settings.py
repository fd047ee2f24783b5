from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline import cadence, codecs, consistency
from shardline.consistency import Gives
from shardline.core.choices import Choices
from shardline.core.places import ALLREDUCE, shards_by_place
from shardline.core.plan import Plan, make_plan
from shardline.core.spec import JobSpec, differences
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, UsageError

FREE = ("name", "checkpoint_every", "checkpoint_keep", "best_metric", "best_is_lowest")
"""Settings that change no step."""


@dataclass(frozen=True)
class ReplayedRun:
    """A run to repeat."""

    path: str
    job: JobSpec
    choices: Choices
    """Whose gradients made each of its steps; empty if those of all replicas did."""
    earlier: tuple[JobSpec, ...] = ()
    """Jobs from which it was resumed."""

    def check(self, job: JobSpec) -> None:
        """Raise UsageError if this job can't repeat the run."""
        mode = consistency.of(job.consistency)
        Gives.SAME_BITS.need(mode, "--replay repeats synchronous runs only", "leave out --replay", UsageError)
        if cadence.of(job).outer_rule is not None:
            raise UsageError(
                f"--replay {self.path}: with cadence {job.cadence} the bits depend on what workers keep from step to "
                "step, and so on who died, which no journal has. Leave out --replay"
            )
        for part in (self.job, *self.earlier):
            # More or fewer steps of the same training are no other job; what the schedule makes of them is compared.
            same = {name: getattr(part, name) for name in (*FREE, "steps")}
            if found := differences(dataclasses.replace(job, **same), part, where="there"):
                which = "that run" if part is self.job else "a part of that run, from which it was resumed,"
                raise UsageError(
                    f"--replay {self.path}: {which} was of another job ({'; '.join(found)}); start the job as it was "
                    "then"
                )
        if Gives.EVERY_GRADIENT in mode.gives:
            return
        if job.script:
            raise UsageError(
                f"--replay {self.path}: a script can't repeat choices, since it may make more steps than the run did; "
                "use a job file"
            )
        if self.choices.first > 0 or self.choices.end < job.steps:
            raise UsageError(
                f"--replay {self.path}: its journal has the choices of steps {self.choices.first} to "
                f"{self.choices.end - 1}, but the job needs those of steps 0 to {job.steps - 1}; set --steps to what "
                "the run has done, or replay another run"
            )


@dataclass(frozen=True, kw_only=True)
class ChiefSettings:
    """The chief's settings, from its command line."""

    term: int
    chief_uuid: str
    job_secret: bytes = field(default=b"", repr=False)
    """Random bytes of this chief's process; see Orders.job_secret."""
    chief_address: str
    ps: tuple[str, ...]
    """Addresses in the cluster spec, by index."""
    workers: int
    evaluators: int = 0
    others: Mapping[str, int] = field(default_factory=dict)
    """Number of tasks of each other role: aggregators, and those that a plugin adds."""
    chief_trains: bool = False
    min_workers: int = 1
    """With fewer tasks that train the job pauses, and ends if that lasts too long."""
    max_workers: int = 64
    inexact: bool = False
    own_ps: int = 0
    """Servers in the processes of workers: the first by index."""
    standbys: int = 0
    """Standbys of each shard: 0 or 1."""
    bucket_bytes: int = 0
    """Target size of a bucket; 0 = by the size of a shard."""
    shards: int = 0
    """Number of shards; 0 = one for each ps."""
    shares: tuple[float, ...] = ()
    """The part of the model for each ps, by index, 0 = none; empty = equal parts. See core.shares."""
    replayed: ReplayedRun | None = None
    """The run to repeat."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Summary of the chief that ended the job; empty if none did."""
    scores: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Where a run is resumed: the scores of its steps until then, by rising steps."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    out: str = ""

    @property
    def trainers(self) -> int:
        """Number of tasks expected to run replicas."""
        return self.workers + self.chief_trains

    def plan(self, job: JobSpec) -> Plan:
        """How the job's tensors are cut over the parameter servers. Raises JobError."""
        held = [share for share in self.shares if share and not self.shards]
        number, places = self.shards or len(held or self.ps), self.places(job)
        if places and self.shards:
            raise JobError(
                "--shards cuts a model for servers that may all hold any part; leave it, or communication, out"
            )
        return make_plan(
            job.tensors, number, bucket_bytes=self.bucket_bytes or None, shares=held or None, places=places
        )

    def places(self, job: JobSpec) -> dict[str, int]:
        """Number of shards for the tensors of each place; empty if any server may hold any tensor. Raises JobError."""
        return shards_by_place(job, self.own_ps, len(self.ps) - self.own_ps)

    def suits(self, index: int, place: str) -> bool:
        """Tell if a ps is for the shards of a place; "" = any."""
        return not place or (index < self.own_ps) == (place == ALLREDUCE)

    def cut_as(self, shares: tuple[float, ...]) -> ChiefSettings:
        """These settings with the shares of a run that is to go on, if it has as many servers."""
        return dataclasses.replace(self, shares=shares if len(shares) == len(self.ps) else ())

    def holds(self, index: int) -> bool:
        """Return whether a ps gets a shard at the start, where there are enough."""
        return bool(self.shards) or not self.shares or self.shares[index] > 0.0


def as_chosen(job: JobSpec, ours: JobSpec) -> JobSpec:
    """The job with the codecs of `ours` where it leaves the choice to the chief."""
    if not codecs.of(job).undecided:
        return job
    return dataclasses.replace(job, codec=ours.codec, codec_up=ours.codec_up, codec_down=ours.codec_down)


def as_in_cluster(job: JobSpec, settings: ChiefSettings) -> JobSpec:
    """The job as this cluster runs it: if replicas are assigned, a script has one per worker."""
    if job.script and consistency.of(job.consistency).assigns_replicas:
        return dataclasses.replace(job, replicas=settings.trainers)
    return job
