"""The memory check: refuses stages that don't fit, or waits for the worker that had them."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

import shardline_pipeline as pipeline
from shardline import update
from shardline.client.api.session import Session
from shardline.client.overlap.gate import StepAgain
from shardline.core.plan import Plan, make_plan
from shardline.core.settings import WORKER
from shardline.core.spec import JobSpec, TensorKind, itemsize
from shardline.errors import JobError
from shardline.host.awake import awake_s
from shardline.host.process import free_memory
from shardline_pipeline.activations.post import PostOffice
from shardline_pipeline.partition.activations import Activations
from shardline_pipeline.partition.costs import beside, versions
from shardline_pipeline.staged import StagedModel
from shardline_pipeline.tensor_parallel import parts

log = logging.getLogger("shardline.worker")

Stages = Mapping[int, Sequence[int]]
"""Of one worker, by replica."""


class MemoryCheck:
    """Checks that what is assigned fits into memory, when it changes."""

    def __init__(self, session: Session, office: PostOffice, model: nn.Module) -> None:
        self._session = session
        self._office = office
        self._model = model
        self._had: Stages = {}

    def check(self) -> None:
        """Raise JobError, see check_memory(), if the job begins.

        Later, stages come from a worker that was lost. Those that don't fit wait for it as long as the cluster waits
        for a lost task: raises StepAgain when the orders change, JobError when the time is up.
        """
        session, stages = self._session, self._office.all_stages()
        if stages == self._had:
            return
        try:
            check_memory(self._model, session.job, stages, session.device, rank=self._office.rank, had=self._had)
        except JobError as error:
            if self._had or session.link.orders.moved:
                self._await_others(error)
            raise
        self._had = stages

    def _await_others(self, error: JobError) -> None:
        link, lost_s = self._session.link, self._session.config.timeouts.lost_s
        log.warning("%s; waiting %.0f s for the worker that had it, or another", error, lost_s)
        end_s = awake_s() + lost_s
        while self._office.still_ordered():
            left_s = end_s - awake_s()
            if left_s <= 0.0:
                raise JobError(f"{error}; the worker that had it has not returned within {lost_s:.0f} s") from error
            link.wait(functools.partial(operator.ne, link.orders), timeout_s=min(left_s, link.timeouts.heartbeat_s))
        raise StepAgain


def check_memory(
    model: nn.Module, job: JobSpec, stages: Stages, device: torch.device, *, rank: int = 0, had: Stages | None = None
) -> None:
    """Refuse stages that don't fit into the memory that is left, the model being in it already.

    rank: of this worker, in layers that several share. had: stages of this worker until now, whose memory is in use,
    and free once they are gone. Counted is what is known before the first pass: see needed_bytes() and
    activation_bytes(). Raises JobError, naming the stage that needs most, its layers, the bytes and the limit.
    """
    in_use, passing = needed_bytes(job, had or {}, rank), activation_bytes(model, job, stages)
    needed = {
        # Between two steps activations are in nobody's memory.
        stage: count + passing.get(stage, 0) - in_use.get(stage, 0)
        for stage, count in needed_bytes(job, stages, rank).items()
    }
    more = sum(needed.values()) - sum(in_use[stage] for stage in in_use.keys() - needed.keys())
    free = free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if more > free:
        largest = max(needed, key=lambda stage: needed[stage])
        others = f", with this worker's other stages {more:,}" if more != needed[largest] else ""
        first = "its gradients, versions of its parameters"
        what = f"{first}, optimizer state and activations" if passing else f"{first} and optimizer state"
        left_out = "" if passing else "; activations are not in it"
        staged = isinstance(model, StagedModel) and pipeline.of(job).staged
        where = f"{cast(StagedModel, model).where(largest)}," if staged else "the model"
        advice = "Cut the model into more stages: `shardline partition --memory` finds some that fit"
        if pipeline.ranks(job) > 1:
            where, advice = f"rank {rank} of {where}", "Choose more tensor_ranks, or cut the model into more stages"
        raise JobError(
            f"{where} does not fit: besides the model, {what} need {needed[largest]:,} bytes{others}, "
            f"and {free:,} are left on {device}{left_out}. {advice}"
        )


def needed_bytes(job: JobSpec, stages: Stages, rank: int = 0) -> dict[int, int]:
    """By stage: bytes of gradients, versions of its parameters but one, predictions, gaps, and optimizer state here."""
    schedule, layout, ranks = pipeline.of(job), pipeline.layout_of(job), pipeline.ranks(job)
    states = state_bytes(job, make_plan(job.tensors, 1)) if job.apply == WORKER else {}
    found = {}
    for stage in sorted({stage for own in stages.values() for stage in own}):
        sizes = dict.fromkeys(TensorKind, 0)
        own = {parts.fragment(stage, ranks, None), parts.fragment(stage, ranks, rank)} if ranks > 1 else {stage}
        for one in job.tensors:
            if one.fragment in own:
                sizes[one.kind] += one.elements * itemsize(one.dtype)
        replicas = sum(stage in own for own in stages.values())
        more = max(versions(schedule, stage, layout)) - 1
        other = beside(schedule, stage, layout)
        copies = replicas * (1 + other.runs) + other.kept
        found[stage] = sizes[TensorKind.PARAM] * copies + sum(sizes.values()) * more + states.get(stage, 0)
    return found


def activation_bytes(model: nn.Module, job: JobSpec, stages: Stages) -> dict[int, int]:
    """By stage: the most that its passes need at a time, besides its parameters; {} where that is not known."""
    if not isinstance(model, StagedModel) or model.profile is None or pipeline.ranks(job) > 1:
        return {}
    schedule, layout = pipeline.of(job), pipeline.layout_of(job)
    activations = Activations(model.profile, recompute=schedule.recompute)
    found = {}
    for stage in sorted({stage for own in stages.values() for stage in own}):
        span, replicas = model.span(stage), [replica for replica, own in stages.items() if stage in own]
        if schedule.flushes:
            count = schedule.held(stage, layout.stages, job.accumulate) * len(replicas)
        else:
            # Replicas of the same worker of the layout share what it is ahead.
            count = (layout.ahead(stage) + 1) * len({layout.crew(replica, stage) for replica in replicas})
        found[stage] = activations.busiest_bytes(
            span.start, span.stop, held=count, share=job.accumulate * len(replicas), flushes=schedule.flushes
        )
    return found


def state_bytes(job: JobSpec, plan: Plan) -> dict[int, int]:
    """By fragment: bytes of the optimizer's state."""
    found: dict[int, int] = {}
    for bucket in (bucket for shard in plan.shards for bucket in shard.buckets):
        if bucket.kind is TensorKind.PARAM:
            fragment = plan.tensors[bucket.slices[0].tensor].fragment
            rule = update.bucket_rule(job.rule, job.schedule, bucket, plan.tensors, torch.device("cpu"))
            found[fragment] = found.get(fragment, 0) + rule.full_nbytes()
    return found
