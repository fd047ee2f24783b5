"""The loop over a job file's steps: gradients of the replicas that the chief assigns, then the servers' update."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.data import BatchSource, checked_loss, replica_gradients
from shardline.job import Job

Loss = Callable[[nn.Module, Any], torch.Tensor]

log = logging.getLogger("shardline.client")


class WatchedLoss:
    """The job's loss. Logs figures that come with it, and warns of parameters in it that are not the model's."""

    def __init__(self, loss: Loss, log_figures: Callable[[Mapping[str, float | torch.Tensor]], None]) -> None:
        self._loss = loss
        self._log = log_figures
        self._seen = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        found = self._loss(model, batch)
        if isinstance(found, Mapping) and (beside := figures_in(found)):
            self._log(beside)
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


def figures_in(found: Mapping[str, Any]) -> dict[str, float | torch.Tensor]:
    """Numbers beside the loss, and tensors of one element that can be read without waiting for a device."""
    return {
        name: value
        for name, value in found.items()
        if name != "loss"
        and (
            (isinstance(value, int | float) and not isinstance(value, bool))
            or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu")
        )
    }


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


def scheduled_steps(session: Session, job: Job, optimizer: ShardlineOptimizer) -> Iterator[int]:
    """Yield the job's steps, each once the optimizer has the settings of the job's scheduler for it."""
    settings = job.group_settings(optimizer)
    if settings is not None:
        settings.scores = lambda: session.link.orders.scores
    for step in session.steps():
        if settings is not None:
            settings.set(optimizer, step)
        yield step


def run_replicas(
    session: Session, optimizer: ShardlineOptimizer, model: nn.Module, job: Job, source: BatchSource
) -> None:
    """Train an attached model until the job ends."""
    watched = dataclasses.replace(job, loss=WatchedLoss(job.loss, session.log))
    for step in scheduled_steps(session, job, optimizer):
        with session.attempt():
            for replica in session.replicas:
                session.begin_replica(replica)
                loss, samples = replica_gradients(model, watched, source, step, replica, session.watch(replica))
                # The next replica's gradients are new tensors.
                session.contribute(replica, loss=loss, samples=samples, keep=True)
            optimizer.step()
