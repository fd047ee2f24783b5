"""The loop over a job file's steps: gradients of the replicas that the chief assigns, then the servers' update."""

from __future__ import annotations

import dataclasses

from torch import nn

from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.client.watch.first_loss import FirstLoss
from shardline.data import BatchSource, replica_gradients
from shardline.job import Job


def run_replicas(
    session: Session, optimizer: ShardlineOptimizer, model: nn.Module, job: Job, source: BatchSource
) -> None:
    """Train an attached model until the job ends."""
    watched = dataclasses.replace(job, loss=FirstLoss(job.loss))
    for step in session.steps():
        with session.attempt():
            for replica in session.replicas:
                session.begin_replica(replica)
                loss, samples = replica_gradients(model, watched, source, step, replica, session.watch(replica))
                # The next replica's gradients are new tensors.
                session.contribute(replica, loss=loss, samples=samples, keep=True)
            optimizer.step()
