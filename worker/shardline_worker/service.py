"""The worker's process: a job file's training loop, over the same session that a user's script uses."""

from __future__ import annotations

import logging
import sys
from contextlib import closing, nullcontext

import torch

from shardline import division
from shardline.client.api.session import Session
from shardline.client.job_loop import run_replicas
from shardline.config import RoleConfig
from shardline.data import BatchSource
from shardline.errors import JobError, UsageError, telling
from shardline.host.process import Termination, tell_ready
from shardline.job import Job, load_job
from shardline.loading.pool import LoaderPool

log = logging.getLogger("shardline.worker")


def run(config: RoleConfig) -> int:
    """Train until the job ends or this worker is asked to leave; returns the exit code."""
    termination = Termination()
    termination.install()
    if config.job is None:
        raise UsageError(f"{config.task} needs --job JOB.py; run a plain training script directly, see examples")
    workers = config.cluster.num("worker")
    job = load_job(config.job, config.overrides, workers=workers, mirrored=config.with_ps)
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
    side = division.of(spec).worker
    if side is not None:
        side.train(session, job, model, spec, source)
    else:
        optimizer = session.attach(model, job.build_optimizer(model), job=spec)
        tell_ready(config.ready_fd, session.link.task)
        run_replicas(session, optimizer, model, job, source)
    log.info("done at step %d: %s", session.step, session.link.orders.reason or "the job has ended")
