"""The loop over a job file's steps: gradients of the replicas that the chief assigns, then the servers' update."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.data import BatchSource, checked_loss, replica_gradients
from shardline.job import Job

Loss = Callable[[nn.Module, Any], torch.Tensor]

log = logging.getLogger("shardline.client")


class FirstLoss:
    """The job's loss. Warns, after its first call, of parameters that it uses and that are not the model's."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._seen = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return what the job's loss returns for a batch."""
        found = self._loss(model, batch)
        if not self._seen:
            self._seen = True
            loss = checked_loss(found)
            foreign = [*foreign_parameters(loss, {id(parameter) for parameter in model.parameters()})]
            if foreign:
                shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:3])
                log.warning(
                    "the loss uses %d parameters that are not in the model (of shape %s%s) and so are not trained; "
                    "make them parameters of the model, or freeze them with requires_grad_(False) if they are not to "
                    "train",
                    len(foreign),
                    shapes,
                    ", ..." if len(foreign) > 3 else "",
                )
        return found


def foreign_parameters(loss: torch.Tensor, known: Collection[int]) -> Iterator[nn.Parameter]:
    """The nn.Parameters that a loss depends on and that are not among these, by id()."""
    todo = [loss.grad_fn]
    # References keep the nodes' objects alive, and so their identity.
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            yield leaf
        new = {before for before, _ in node.next_functions} - seen
        seen |= new
        todo.extend(new)


def run_replicas(
    session: Session, optimizer: ShardlineOptimizer, model: nn.Module, job: Job, source: BatchSource
) -> None:
    """Train an attached model until the job ends."""
    watched = dataclasses.replace(job, loss=FirstLoss(job.loss))
    for step in job.scheduled(session.steps(), optimizer):
        with session.attempt():
            for replica in session.replicas:
                session.begin_replica(replica)
                loss, samples = replica_gradients(model, watched, source, step, replica, session.watch(replica))
                # The next replica's gradients are new tensors.
                session.contribute(replica, loss=loss, samples=samples, keep=True)
            optimizer.step()
