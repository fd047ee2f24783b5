"""The worker's process: a job file's training loop, over the same session that a user's script uses."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from contextlib import closing, nullcontext

import torch

from shardline import pipeline
from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.client.job_loop import run_replicas
from shardline.config import RoleConfig
from shardline.data import BatchSource
from shardline.errors import JobError, UsageError, telling
from shardline.fit import goes_back
from shardline.host.process import Termination, tell_ready
from shardline.job import Job, load_job
from shardline.loading.pool import LoaderPool
from shardline.pipeline.replica_tensors import StepPart
from shardline.pipeline.runner import StageRunner
from shardline.pipeline.schedules.gaps import Gaps
from shardline.pipeline.staged import StagedModel
from shardline.pipeline.stream import ParameterSource, StreamRunner
from shardline_worker.room import Room

log = logging.getLogger("shardline.worker")


def run(config: RoleConfig) -> int:
    """Train until the job ends or this worker is asked to leave; returns the exit code."""
    termination = Termination()
    termination.install()
    if config.job is None:
        raise UsageError(f"{config.task} needs --job JOB.py; run a plain training script directly, see examples")
    job = load_job(config.job, config.overrides, workers=config.cluster.num("worker"))
    torch.set_num_threads(job.threads)
    # Before there are threads and connections, which a fork would have too.
    loaders = start_loaders(job, config.task)
    with closing(loaders) if loaders is not None else nullcontext():
        session = Session(config, termination=termination)
        try:
            with telling(session.fail):
                train(session, job, config, loaders)
        finally:
            session.shutdown()
    return session.link.orders.exit_code if config.exit_with_job else 0


def start_loaders(job: Job, task: str) -> LoaderPool | None:
    """Processes that read the job's batches ahead; None if it wants none, or they would only copy rows of tensors."""
    if not job.loaders:
        return None
    if sys.platform != "linux":
        raise JobError(f"Job.loaders is {job.loaders}, but loaders need Linux; this is {sys.platform}: use loaders=0")
    source = BatchSource(job)
    if source.at_once:
        log.info("the data set is rows of tensors, which need no loaders")
        return None
    count = job.loaders
    if source.ordered and count > 1:
        log.info("an iterable data set is read in its order, by one loader")
        count = 1
    return LoaderPool(source, loaders=count, prefetch=job.prefetch, accumulate=job.accumulate, who=task)


def train(session: Session, job: Job, config: RoleConfig, loaders: LoaderPool | None) -> None:
    """Join with the job's model, then run the replicas that the chief assigns, step by step."""

    def end() -> int | None:
        leased = session.leases.end
        return session.trainer.methods.cadence.rounds.ticks_before(leased) if leased is not None else None

    source = BatchSource(job, session.data_took, ahead=loaders, end=end)
    model = job.build_model().to(session.device)
    spec = job.spec(model)
    if pipeline.ranks(spec) > 1:
        # Only here: torch.distributed takes a second to import.
        from shardline_worker.ranks import RankWorker

        RankWorker(session, job, model, spec, source).train()
        _log_end(session)
        return
    optimizer = session.attach(model, job.build_optimizer(model), job=spec)
    tell_ready(config.ready_fd, session.link.task)
    schedule = pipeline.of(spec)
    if isinstance(model, StagedModel) and goes_back(spec):
        train_stream(session, optimizer, model, job, source)
        return
    if isinstance(model, StagedModel) and schedule.staged:
        # Run the stages that the chief assigns, step by step.
        runner = StageRunner(model, job, source, schedule, session.parcels, rest=functools.partial(_rest, session))
        room = Room(session, model)
        for step in session.steps():
            with session.attempt():
                room.check()
                session.begin_replica(min(session.replicas))
                stages = {replica: session.parcels.stages(replica) for replica in session.replicas}
                # No name for what it returns: gradients go when they are applied.
                _contribute(session, runner.run(step, stages), runner.samples)
                optimizer.step()
        _log_end(session)
        return
    run_replicas(session, optimizer, model, job, source)
    _log_end(session)


def _rest(session: Session) -> None:
    if session.trainer.methods.applied is not None:
        session.trainer.methods.applied.rest()


def train_stream(
    session: Session, optimizer: ShardlineOptimizer, model: StagedModel, job: Job, source: BatchSource
) -> None:
    """The same where no stage can begin a step again: what is computed stays in the runner."""

    def pulled() -> Mapping[str, torch.Tensor]:
        return session.trainer.methods.arrived

    def predict(stage: int, late: int) -> Mapping[str, torch.Tensor]:
        applied = session.trainer.methods.applied
        assert applied is not None, "checked when the job was read"
        return applied.predict(stage, late)

    runner = StreamRunner(
        model,
        job,
        source,
        pipeline.of(session.job),
        session.parcels,
        ParameterSource(pulled=pulled, predict=predict, gaps=lambda: Gaps(session.job)),
        steps=session.job.steps,
    )
    room = Room(session, model)
    for step in session.steps():
        with session.attempt():
            room.check()
            runner.begin(step, session.parcels.timeline, session.parcels.all_stages())
            session.begin_replica(min(session.replicas))
            parts = runner.run()
            with torch.no_grad():
                for part in parts.values():
                    for name, values in part.buffers.items():
                        pulled()[name].copy_(values)
            _contribute(session, parts, runner.samples)
            optimizer.step()
    _log_end(session)


def _contribute(session: Session, parts: Mapping[int, StepPart], samples: int) -> None:
    """Contribute what was computed of each replica. samples: of a replica's part of a step."""
    for replica in session.replicas:
        part = parts[replica]
        # Whoever has the last stage reports.
        known = samples if part.loss is not None else 0
        session.contribute(replica, loss=part.loss, samples=known, gradients=part.gradients, keep=True)


def _log_end(session: Session) -> None:
    log.info("done at step %d: %s", session.step, session.link.orders.reason or "the job has ended")
