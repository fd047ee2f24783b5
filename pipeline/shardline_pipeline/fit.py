"""What a job that divides its replicas can't be combined with. Pure."""

from __future__ import annotations

import shardline_pipeline as pipeline
from shardline import cadence, codecs, consistency
from shardline.cadence import Sends
from shardline.codecs.auto import undecided
from shardline.codecs.base import Memory
from shardline.consistency import Consistency, Gives
from shardline.core.settings import WORKER
from shardline.core.spec import JobSpec
from shardline.errors import JobError
from shardline.update import Need, chosen
from shardline_pipeline.by_stage import ByStage
from shardline_pipeline.schedules.gaps import check_gaps


def goes_back(job: JobSpec) -> bool:
    """Whether a job with stages goes back to a checkpoint when a stage moves to another worker.

    Without a flush stages are at different steps. Where replicas don't wait for each other, the parameters that a step
    was begun with are nowhere else.
    """
    return not pipeline.of(job).flushes or isinstance(consistency.of(job.consistency), ByStage)


def check(job: JobSpec, *, standbys: int, workers: int | None) -> None:
    """Refuse what needs a worker that has a whole replica, or replicas that are late by themselves."""
    mode, pace = consistency.of(job.consistency), cadence.of(job)
    chosen_pipeline = pipeline.of(job)
    how = (
        f"pipeline {chosen_pipeline}" if chosen_pipeline.staged else f"tensor_parallel over {pipeline.ranks(job)} ranks"
    )
    if Gives.PARTS not in mode.gives:
        also = ", 'async' or 'ssp'" if chosen_pipeline.staged and pipeline.ranks(job) == 1 else ""
        raise JobError(
            f"{how} takes every step with all parts of all replicas, but consistency {mode} does not; choose "
            f"consistency='sync' without spares{also}"
        )
    if isinstance(mode, ByStage):
        _check_by_stage(job, mode)
    if pace.sends is not Sends.GRADIENTS:
        raise JobError(
            f"cadence {pace} needs workers that have the whole model, but those of {how} have a part of it; leave it "
            "out"
        )
    if job.consistency.nan_policy == "skip":
        raise JobError(
            f"nan_policy 'skip' is for workers that see all gradients of a replica, but those of {how} see a part; "
            "choose nan_policy='stop'"
        )
    keeping = next((one for one in codecs.of(job).ups if one.memory is not Memory.NONE), None)
    keeping = keeping or next((one for one in codecs.of(job).downs if one.memory.shared), None)
    if keeping is not None:
        raise JobError(
            f"codec {keeping} remembers what it has sent, which moves to another worker when its worker dies; with "
            f"{how} choose a codec without memory, such as bf16 or int8"
        )
    if any(undecided(one) for one in codecs.of(job).ups):
        raise JobError(
            f"codec {job.codec} measures workers that have the whole model; with {how} choose a codec, such as bf16"
        )
    _check_ranks(job, how, workers=workers)
    pipeline.check_hosts(job.hosts, pipeline.stages(job), job.replicas, workers=workers)
    chosen_pipeline.check(pipeline.layout_of(job))
    if not chosen_pipeline.flushes:
        if pipeline.ranks(job) > 1:
            raise JobError(
                f"pipeline {chosen_pipeline} has no flush, and workers that share layers begin a step together; choose "
                "pipeline='flush', or leave tensor_parallel out"
            )
        # Each replica goes on by itself from where it is.
        _check_asynchronous(job, standbys=0 if isinstance(mode, ByStage) else standbys)


def _check_ranks(job: JobSpec, how: str, *, workers: int | None) -> None:
    ranks = pipeline.ranks(job)
    if workers is not None and workers < ranks:
        raise JobError(
            f"tensor_parallel shares layers among {ranks} workers of one host, but the cluster has {workers}; start "
            "more, or choose another tensor_ranks"
        )
    if ranks > 1 and job.hosts:
        raise JobError(
            "the Pipeline names the workers of each stage, but tensor_parallel makes teams of workers by itself; leave "
            "`workers` out of the Pipeline, or tensor_parallel out of the job"
        )
    if ranks > 1 and job.apply == WORKER:
        raise JobError(
            f"with apply 'worker' every worker runs the optimizer on whole tensors, but those of {how} have a "
            "part; leave `apply` out, or tensor_parallel"
        )


def _check_by_stage(job: JobSpec, mode: Consistency) -> None:
    found = pipeline.of(job)
    rule = chosen(job.rule)
    if lacking := sorted(need.value for need in rule.needs - {Need.WORKER}):
        raise JobError(
            f"update rule {rule} needs {', '.join(lacking)}, but with consistency {mode} the passes of a pipeline have "
            "several versions, and no server knows which; choose a rule that needs none of it, or "
            "pipeline='whole-model'"
        )
    how = f"consistency {mode} applies each replica's gradient of a stage of pipeline {found} by itself"
    if pipeline.ranks(job) > 1:
        raise JobError(
            f"{how}, but workers that share layers begin a step together; choose consistency='sync', or leave "
            "tensor_parallel out"
        )
    if job.consistency.clip_norm > 0.0:
        raise JobError(
            f"{how}, but clip_norm={job.consistency.clip_norm:g} is one decision about the gradients of all stages; "
            "leave it out, or choose consistency='sync' and pipeline='flush'"
        )
    if found.gap_aware:
        raise JobError(
            f"{how}, but gap_aware measures how far parameters have moved when a gradient is applied, and other "
            "replicas move them meanwhile; choose consistency='sync', or leave gap_aware out"
        )


def _check_asynchronous(job: JobSpec, *, standbys: int) -> None:
    found = pipeline.of(job)
    if found.predict and job.apply != WORKER:
        raise JobError(
            f"pipeline {found} predicts parameters from the optimizer's state, which with apply 'server' no worker "
            "has; choose apply='worker', or leave predict out"
        )
    if found.gap_aware:
        check_gaps(job)
    if job.consistency.clip_norm > 0.0:
        raise JobError(
            f"clip_norm={job.consistency.clip_norm:g} is one decision about the gradients of all stages, but those of "
            f"pipeline {job.pipeline} are at different steps; leave it out, or choose pipeline='flush'"
        )
    if standbys:
        raise JobError(
            f"a standby goes on from the parameters of one step, but stages of pipeline {job.pipeline} are at "
            "different ones; leave out --standbys, or choose pipeline='flush'"
        )
