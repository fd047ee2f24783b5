"""The loop of a worker that shares layers with others of its host: each step with all of them, or again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

import shardline_pipeline as pipeline
from shardline.client.api.session import Session
from shardline.client.job_loop import scheduled_steps
from shardline.core.spec import JobSpec
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError
from shardline.host.process import tell_ready
from shardline.job import Job
from shardline_pipeline.activations.post import PostOffice
from shardline_pipeline.base import Pass
from shardline_pipeline.model import Pipeline
from shardline_pipeline.runner import StageRunner, Unit
from shardline_pipeline.stage_work import At
from shardline_pipeline.tensor_parallel import layers_of
from shardline_pipeline.tensor_parallel.rank_model import RankModel
from shardline_pipeline.tensor_parallel.team import Team
from shardline_pipeline.tensor_parallel.trial import try_parts
from shardline_pipeline.worker.memory import MemoryCheck


class TeamRunner(StageRunner):
    """A StageRunner of each rank of a process group, whose rank 0 says which unit is next."""

    def choose(self, first: Mapping[Unit, tuple[At, Pass]]) -> Unit:
        # What rank 0 has ready, the others have or will get.
        if len(first) > 1:
            units = sorted(first)
            number = torch.tensor([units.index(super().choose(first)) if dist.get_rank() == 0 else 0])
            dist.broadcast(number, src=0)
            chosen = units[int(number)]
            first = {chosen: first[chosen]}
        return super().choose(first)


class RankWorker:
    """A worker's rank in shared layers, also in the stages of a pipeline. Attaches the session to the job's model."""

    def __init__(self, session: Session, job: Job, model: nn.Module, spec: JobSpec, source: BatchSource) -> None:
        if session.device.type != "cpu":
            raise JobError(
                f"workers that share layers compute on CPUs, but this one was given {session.device}; start it with "
                "--device cpu, or train with --set tensor_ranks=1"
            )
        self._session = session
        self._job = job
        self._source = source
        self._schedule = pipeline.of(spec)
        layers = layers_of(job, model)
        try_parts(model, job, layers, pipeline.ranks(spec))
        optimizer = job.build_optimizer(model)
        self._model = RankModel(model, spec.tensors, layers)
        self._optimizer = session.attach(self._model.values, optimizer, job=spec)
        assert isinstance(session.partners, PostOffice), "the job has parts"
        self._office = session.partners
        self._team = Team(session.config.timeouts, self._office.still_ordered)
        self._module = model
        """Of the present team."""
        self._memory = MemoryCheck(session, self._office, model)
        self._runner: TeamRunner | None = None
        """Set if the model has stages."""

    def train(self) -> None:
        """Compute step after step, until the job ends."""
        session = self._session
        self._office.on_interrupt = self._team.interrupt
        tell_ready(session.config.ready_fd, session.link.task)
        try:
            for step in scheduled_steps(session, self._job, self._optimizer):
                with session.attempt():
                    self._gather(step)
                    if self._runner is None:
                        self._compute_replicas(step)
                    else:
                        self._compute_stages(step, self._runner)
                    self._optimizer.step()
        finally:
            self._team.close()

    def _gather(self, step: int) -> None:
        """Have a team for this step. Where a worker has looked for its step again, all of its team do."""
        session, office, team = self._session, self._office, self._team
        self._memory.check()
        if team.mesh is not None and not session.trainer.open.first:
            return
        about = f"timeline {office.timeline}, step {step} of replicas {session.replicas}, stages {office.all_stages()}"
        mesh = team.meet(office.team(), office.rank, about, office.job_secret)
        with team.together():
            self._module = self._model.module(mesh)
        if isinstance(self._module, Pipeline) and self._schedule.staged:
            self._runner = TeamRunner(self._module, self._job, self._source, self._schedule, office)

    # All ranks have the same loss, and what all have is pushed by rank 0: see shardline_pipeline.share_of.

    def _compute_replicas(self, step: int) -> None:
        session = self._session
        for replica in session.replicas:
            session.begin_replica(replica)
            with self._team.together():
                loss, samples = replica_gradients(self._module, self._job, self._source, step, replica)
                named = self._module.named_parameters()
                gradients = self._model.gradients({name: one.grad for name, one in named if one.grad is not None})
            session.contribute(replica, loss=loss, samples=samples, gradients=gradients, keep=True)

    def _compute_stages(self, step: int, runner: TeamRunner) -> None:
        session = self._session
        replicas = session.replicas
        session.begin_replica(min(replicas))
        with self._team.together():
            parts = runner.run(step, {replica: self._office.stages(replica) for replica in replicas})
            gradients = {replica: self._model.gradients(parts[replica].gradients) for replica in replicas}
        for replica in replicas:
            loss = parts[replica].loss
            samples = runner.samples if loss is not None else 0
            session.contribute(replica, loss=loss, samples=samples, gradients=gradients[replica], keep=True)
