"""Pipelines: models cut into stages, each computed by another worker. The schedules are listed in PIPELINES.

A unit is one stage of one replica, the smallest part of a step that a worker can be given; where workers share layers,
one rank of it. Units are numbered rank by rank, and stage by stage within a rank, so that workers with several have the
same stage of several replicas rather than several stages of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardline.core.placement import Post
from shardline.core.plan import Plan
from shardline.core.settings import Settings
from shardline.core.spec import JobSpec
from shardline.division import PIPELINES, numbered
from shardline.division.share import Share
from shardline.seams import Resident
from shardline_pipeline.base import Pass, PipelineSchedule, StageLayout, bubble
from shardline_pipeline.hosts import assign_hosts, check_hosts, planned_hosts
from shardline_pipeline.model import Pipeline
from shardline_pipeline.schedules.asynchronous import DoubleBuffer, FTPipe, NoStash, Stash, VerticalSync
from shardline_pipeline.schedules.flushed import Flush, GPipe, Undivided
from shardline_pipeline.tensor_parallel import parts

for _kind in (GPipe, Flush, DoubleBuffer, Stash, VerticalSync, FTPipe, NoStash):
    PIPELINES.add(_kind)


def schedule_named(choice: str | Resident) -> PipelineSchedule:
    """The schedule for a text; that of undivided models for "whole-model". Raises JobError for an unknown one."""
    found = PIPELINES.parse(choice)
    return found if isinstance(found, PipelineSchedule) else Undivided()


def of(job: Settings) -> PipelineSchedule:
    """The schedule that a job names. Raises JobError for an unknown one."""
    return schedule_named(job.pipeline)


def stages(job: JobSpec) -> int:
    """Number of stages of a job's model; 1 without a pipeline. Every stage has tensors of its own."""
    if not of(job).staged:
        return 1
    return 1 + (job.fragments - 1) // parts.width(ranks(job))


def ranks(job: JobSpec) -> int:
    """Number of workers that share each layer in `tensor_parallel`; 1 if none is shared."""
    return job.ranks


def divided(job: JobSpec) -> bool:
    """Whether a worker computes only a part of a replica's step: some stages, or a rank."""
    return of(job).staged or ranks(job) > 1


def cells(job: JobSpec) -> int:
    """Number of stages of all replicas: what workers that share layers compute together."""
    return job.replicas * stages(job)


def units(job: JobSpec) -> int:
    """Number of units of a job: its replicas, where a worker computes the whole model."""
    return cells(job) * ranks(job)


def unit_of(job: JobSpec, stage: int, replica: int, rank: int = 0) -> int:
    return rank * cells(job) + stage * job.replicas + replica


def rank_of(job: JobSpec, owned: Iterable[int]) -> int:
    """The rank of a worker with these units, which all have the same; 0 without any."""
    return min(owned, default=0) // cells(job)


def by_replica(job: JobSpec, owned: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
    """The stages among some units, ascending, by replica."""
    found: dict[int, list[int]] = {}
    for unit in sorted(owned):
        found.setdefault(unit % job.replicas, []).append(unit % cells(job) // job.replicas)
    return {replica: tuple(found[replica]) for replica in sorted(found)}


def neighbours(job: JobSpec, posts: Sequence[Post], task: str) -> Mapping[tuple[int, int], Post]:
    """Who computes each stage with this worker's rank, by (stage, replica); without posts nobody."""
    rank = rank_of(job, [unit for unit, post in enumerate(posts) if post.task == task])
    found = {
        (stage, replica): unit_of(job, stage, replica, rank)
        for stage in range(stages(job))
        for replica in range(job.replicas)
    }
    return {place: posts[unit] for place, unit in found.items() if unit < len(posts)}


def bound(job: JobSpec, posts: Sequence[Post], replicas: Iterable[int]) -> list[int]:
    """These replicas, and those that workers with stages of several have make each step together with one of them."""
    held: dict[str, set[int]] = {}
    for unit, post in enumerate(posts):
        held.setdefault(post.task, set()).add(unit % job.replicas)
    found = set(replicas)
    while more := {other for own in held.values() if own & found for other in own} - found:
        found |= more
    return sorted(found)


def planned(job: JobSpec) -> dict[int, str]:
    """Task by unit, where the model names its workers; else {}."""
    return planned_hosts(job.hosts, job.replicas) if of(job).staged else {}


def layout_of(job: JobSpec) -> StageLayout:
    return StageLayout.of(job.hosts, stages(job), job.replicas, job.accumulate)


def assigned(job: JobSpec, previous: Mapping[int, str], living: Sequence[str]) -> dict[int, str]:
    """Task by unit, where the model names its workers: see assign_hosts().

    Without a flush, what a stage's worker has stays together, so that whoever computes it goes back in the layout's
    order: see AsynchronousSchedule.follows().
    """
    plan, size = planned(job), layout_of(job)
    groups: dict[tuple[int, int], list[int]] = {}
    for unit in plan:
        stage, replica = divmod(unit, job.replicas)
        crew = replica if of(job).flushes else size.crew(replica, stage)
        groups.setdefault((stage, crew), []).append(unit)
    return assign_hosts(plan, previous, living, together=list(groups.values()))


def share_of(job: JobSpec, plan: Plan, owned: Iterable[int]) -> Share:
    """What a worker with these units exchanges. What all ranks have, all pull, and rank 0 pushes."""
    own = list(owned)
    found = by_replica(job, own)
    if not divided(job):
        return Share(plan, found)
    count, rank = ranks(job), rank_of(job, own)
    shared = {stage: parts.fragment(stage, count, None) for stages_ in found.values() for stage in stages_}
    parted = {stage: parts.fragment(stage, count, rank) for stage in shared} if count > 1 else {}
    pushed = {
        stage: [*([shared[stage]] if rank == 0 else []), *([parted[stage]] if parted else [])] for stage in shared
    }
    return Share(
        plan,
        found,
        fragments={replica: [one for stage in own_ for one in pushed[stage]] for replica, own_ in found.items()},
        pulled=shared.values(),
    )


def named(job: JobSpec, owned: Sequence[int]) -> str:
    """Units for messages: "replicas 0, 1", "stage 1 of replicas 0, 1", "rank 0 of replica 0"."""
    if not divided(job):
        return numbered("replica", owned)
    found: dict[int, list[int]] = {}
    for unit in sorted(owned):
        found.setdefault(unit // job.replicas, []).append(unit % job.replicas)
    return ", ".join(f"{_part(job, part)} of {numbered('replica', replicas)}" for part, replicas in found.items())


def _part(job: JobSpec, number: int) -> str:
    rank, stage = divmod(number, stages(job))
    names = [f"rank {rank}"] if ranks(job) > 1 else []
    return " of ".join([*names, f"stage {stage}"] if of(job).staged else names)


__all__ = [
    "PIPELINES",
    "DoubleBuffer",
    "FTPipe",
    "Flush",
    "GPipe",
    "NoStash",
    "Pass",
    "Pipeline",
    "PipelineSchedule",
    "StageLayout",
    "Stash",
    "VerticalSync",
    "bubble",
    "check_hosts",
]
"""Names from other modules, for __init__.pyi; it lists those that are defined here as well."""
