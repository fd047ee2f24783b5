"""The chief's settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from shardline import consistency
from shardline.core.spec import JobSpec
from shardline.core.timeouts import Timeouts


@dataclass(frozen=True, kw_only=True)
class ChiefSettings:
    """The chief's settings, from its command line."""

    term: int
    chief_uuid: str
    chief_address: str
    ps: tuple[str, ...]
    """Addresses in the cluster spec, by index."""
    workers: int
    evaluators: int = 0
    chief_trains: bool = False
    min_workers: int = 1
    """With fewer tasks that train the job pauses, and ends if that lasts too long."""
    max_workers: int = 64
    inexact: bool = False
    standbys: int = 0
    """Standbys of each shard: 0 or 1."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    out: str = ""

    @property
    def trainers(self) -> int:
        """Number of tasks expected to run replicas."""
        return self.workers + self.chief_trains


def as_in_cluster(job: JobSpec, settings: ChiefSettings) -> JobSpec:
    """The job as this cluster runs it: if replicas are assigned, a script has one per worker."""
    if job.script and consistency.of(job.consistency).assigns_replicas:
        return dataclasses.replace(job, replicas=settings.trainers)
    return job
