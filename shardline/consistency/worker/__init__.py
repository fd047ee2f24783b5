"""The worker's half of a consistency: what a step waits for, and what is sent again after a restart."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.consistency.worker.base import Mark, Stamp, Standing, WorkerHalf
from shardline.consistency.worker.own_pushes import OwnPushes
from shardline.consistency.worker.shared_steps import SharedSteps
from shardline.core.spec import JobSpec

_HALVES: Mapping[str, type[WorkerHalf]] = {"sync": SharedSteps, "async": OwnPushes}


def worker_half(job: JobSpec) -> WorkerHalf:
    """The half that a job's consistency asks for, at the job's beginning."""
    return _HALVES[job.consistency.mode](job)


__all__ = ["Mark", "OwnPushes", "SharedSteps", "Stamp", "Standing", "WorkerHalf", "worker_half"]
