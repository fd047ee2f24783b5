"""The loops of workers that compute the stages or ranks that the chief assigns, over the session of any worker."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

import shardline_pipeline as pipeline
from shardline.client.api.session import Session
from shardline.client.applied.worker_optimizer import OptimizerBuckets
from shardline.client.job_loop import scheduled_steps
from shardline.client.partners import Hooks
from shardline.config import RoleConfig
from shardline.core.spec import JobSpec
from shardline.data import BatchSource
from shardline.host.process import tell_ready
from shardline.job import Job
from shardline.observability.metrics import Metrics
from shardline_pipeline.activations.post import PostOffice
from shardline_pipeline.fit import goes_back
from shardline_pipeline.replica_tensors import StepPart
from shardline_pipeline.runner import StageRunner
from shardline_pipeline.schedules.gaps import Gaps
from shardline_pipeline.staged import StagedModel
from shardline_pipeline.stream import ParameterSource, StreamRunner
from shardline_pipeline.worker.memory import MemoryCheck


class PartsWorker:
    """A shardline.client.partners.WorkerSide."""

    def partners(self, config: RoleConfig, metrics: Metrics, hooks: Hooks) -> PostOffice:
        return PostOffice(config, metrics, hooks)

    def train(self, session: Session, job: Job, model: nn.Module, spec: JobSpec, source: BatchSource) -> None:
        if pipeline.ranks(spec) > 1:
            # Only here: torch.distributed takes a second to import.
            from shardline_pipeline.worker.ranks import RankWorker

            RankWorker(session, job, model, spec, source).train()
            return
        assert isinstance(model, StagedModel), "checked when the job was read"
        optimizer = session.attach(model, job.build_optimizer(model), job=spec)
        tell_ready(session.config.ready_fd, session.link.task)
        run = _Stream if goes_back(spec) else _Stages
        loop = run(session, job, model, source)
        memory = MemoryCheck(session, office_of(session), model)
        for step in scheduled_steps(session, job, optimizer):
            with session.attempt():
                memory.check()
                # No name for what it returns: gradients go when they are applied.
                _contribute(session, loop.compute(step), job.batch_size * job.accumulate)
                optimizer.step()


class _Stages:
    """Computes stages step by step; any step can be begun again."""

    def __init__(self, session: Session, job: Job, model: StagedModel, source: BatchSource) -> None:
        self._session = session
        self._office = office_of(session)
        self._runner = StageRunner(model, job, source, pipeline.of(session.job), self._office, rest=self._rest)

    def _rest(self) -> None:
        if self._session.trainer.methods.applied is not None:
            self._session.trainer.methods.applied.rest()

    def compute(self, step: int) -> Mapping[int, StepPart]:
        replicas = self._session.replicas
        self._session.begin_replica(min(replicas))
        return self._runner.run(step, {replica: self._office.stages(replica) for replica in replicas})


@torch.no_grad()
def predicted(buckets: OptimizerBuckets, job: JobSpec, stage: int, late: int, *, clock: int) -> dict[str, torch.Tensor]:
    """A stage's parameters after `late` more steps of the optimizer, without a gradient, by name.

    clock: the step of the parameters.
    """
    found: dict[str, torch.Tensor] = {}
    for key, rule in buckets.rules.items():
        pieces = buckets.bucket(key).slices
        if buckets.plan.tensors[pieces[0].tensor].fragment != stage:
            continue
        twin, values = buckets.rule(job, key), buckets.values(key)
        twin.load(*rule.export())
        for step in range(clock, clock + late):
            twin.apply(values, torch.zeros_like(values), clock=step, present=[True] * len(pieces))
        for piece in pieces:
            spec = buckets.plan.tensors[piece.tensor]
            whole = found.setdefault(spec.name, values.new_empty(spec.shape)).view(-1)
            start = piece.first_row * spec.row_elements
            whole[start : start + piece.elements] = values[piece.offset : piece.end]
    return found


class _Stream:
    """Computes stages where none can begin a step again: what is computed stays in the runner."""

    def __init__(self, session: Session, job: Job, model: StagedModel, source: BatchSource) -> None:
        self._session = session
        self._office = office_of(session)
        spec = session.job
        made = ParameterSource(pulled=self._pulled, predict=self._predict, gaps=lambda: Gaps(spec))
        self._runner = StreamRunner(model, job, source, pipeline.of(session.job), self._office, made, steps=spec.steps)

    def _pulled(self) -> Mapping[str, torch.Tensor]:
        return self._session.trainer.methods.arrived

    def _predict(self, stage: int, late: int) -> Mapping[str, torch.Tensor]:
        applied = self._session.trainer.methods.applied
        assert applied is not None, "checked when the job was read"
        assert applied.step is not None, "its parameters have arrived"
        return predicted(applied.buckets, self._session.job, stage, late, clock=applied.step)

    def compute(self, step: int) -> Mapping[int, StepPart]:
        self._runner.begin(step, self._office.timeline, self._office.all_stages())
        self._session.begin_replica(min(self._session.replicas))
        parts = self._runner.run()
        with torch.no_grad():
            for part in parts.values():
                for name, values in part.buffers.items():
                    self._pulled()[name].copy_(values)
        return parts


def office_of(session: Session) -> PostOffice:
    assert isinstance(session.partners, PostOffice), "the job has parts"
    return session.partners


def _contribute(session: Session, parts: Mapping[int, StepPart], samples: int) -> None:
    """Contribute what was computed of each replica. samples: of a replica's part of a step."""
    for replica in session.replicas:
        part = parts[replica]
        # Whoever has the last stage reports.
        known = samples if part.loss is not None else 0
        session.contribute(replica, loss=part.loss, samples=known, gradients=part.gradients, keep=True)
