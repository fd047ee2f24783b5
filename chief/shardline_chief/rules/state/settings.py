"""What the chief was started with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from shardline import consistency
from shardline.core.spec import JobSpec
from shardline.core.timeouts import Timeouts


@dataclass(frozen=True, kw_only=True)
class ChiefSettings:
    """What the chief was started with."""

    term: int
    chief_uuid: str
    chief_address: str
    ps: tuple[str, ...]
    """Addresses in the cluster spec, by index."""
    workers: int
    evaluators: int = 0
    chief_trains: bool = False
    min_workers: int = 1
    """With fewer tasks that train the job stands still, and it ends where that lasts too long."""
    max_workers: int = 64
    inexact: bool = False
    standbys: int = 0
    """Standbys of each shard: 0 or 1."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    out: str = ""

    @property
    def trainers(self) -> int:
        """Tasks that are expected to run replicas."""
        return self.workers + self.chief_trains


def as_in_cluster(job: JobSpec, settings: ChiefSettings) -> JobSpec:
    """The job with what only the cluster knows: where replicas are assigned, a script has one per worker."""
    if job.script and consistency.of(job.consistency).assigns_replicas:
        return dataclasses.replace(job, replicas=settings.trainers)
    return job
