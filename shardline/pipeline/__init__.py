"""Pipelines: models cut into stages, each computed by another worker. One file per schedule, listed in PIPELINES.

A unit is one stage of one replica, the smallest part of a step that a worker can be given. Units are numbered stage by
stage, so that workers with several have the same stage of several replicas rather than several stages of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardline.core.plan import Plan
from shardline.core.spec import JobSpec
from shardline.pipeline.base import Pass, PipelineSchedule, bubble
from shardline.pipeline.hosts import assign_hosts, check_hosts, planned_hosts
from shardline.pipeline.schedules.double_buffer import DoubleBuffer
from shardline.pipeline.schedules.flush import Flush
from shardline.pipeline.schedules.gpipe import GPipe
from shardline.pipeline.schedules.stash import Stash
from shardline.pipeline.schedules.unbroken import Unbroken
from shardline.pipeline.schedules.vertical_sync import VerticalSync
from shardline.pipeline.schedules.whole import WholeModel
from shardline.pipeline.share import Share
from shardline.seams import Table

PIPELINES: Table[PipelineSchedule] = Table("pipeline", WholeModel, GPipe, Flush, DoubleBuffer, Stash, VerticalSync)


def of(job: JobSpec) -> PipelineSchedule:
    """The pipeline that a job names. Raises JobError for an unknown one."""
    return PIPELINES.parse(job.pipeline)


def stages(job: JobSpec) -> int:
    """Number of stages of a job's model; 1 without a pipeline. Every stage has tensors of its own."""
    return 1 + max(tensor.fragment for tensor in job.tensors) if of(job).staged else 1


def units(job: JobSpec) -> int:
    """Number of units of a job: its replicas, where there is no pipeline."""
    return job.replicas * stages(job)


def unit_of(job: JobSpec, stage: int, replica: int) -> int:
    """Number of a unit."""
    return stage * job.replicas + replica


def by_replica(job: JobSpec, owned: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
    """The stages among some units, ascending, by replica."""
    found: dict[int, list[int]] = {}
    for unit in sorted(owned):
        found.setdefault(unit % job.replicas, []).append(unit // job.replicas)
    return {replica: tuple(found[replica]) for replica in sorted(found)}


def planned(job: JobSpec) -> dict[int, str]:
    """Task by unit, where the model names its workers; else {}."""
    return planned_hosts(job.hosts, job.replicas) if of(job).staged else {}


def share_of(job: JobSpec, plan: Plan, owned: Iterable[int]) -> Share:
    """What a worker with these units exchanges."""
    found = by_replica(job, owned)
    return Share(plan, found, stages=found if of(job).staged else None)


def named(job: JobSpec, owned: Sequence[int]) -> str:
    """Units for messages: "replicas 0, 1", or in a pipeline "stage 1 of replicas 0, 1"."""
    if not of(job).staged:
        return _numbered("replica", owned)
    found: dict[int, list[int]] = {}
    for unit in sorted(owned):
        found.setdefault(unit // job.replicas, []).append(unit % job.replicas)
    return ", ".join(f"stage {stage} of {_numbered('replica', replicas)}" for stage, replicas in found.items())


def _numbered(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


__all__ = [
    "PIPELINES",
    "DoubleBuffer",
    "Flush",
    "GPipe",
    "Pass",
    "PipelineSchedule",
    "Share",
    "Stash",
    "Unbroken",
    "VerticalSync",
    "WholeModel",
    "assign_hosts",
    "bubble",
    "by_replica",
    "check_hosts",
    "named",
    "of",
    "planned",
    "share_of",
    "stages",
    "unit_of",
    "units",
]
