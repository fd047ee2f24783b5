"""Common parts of all doors: refuse a second way to train in several processes, and compare what servers don't hold."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import nn

from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.errors import JobError
from shardline.host.printable import printable

DIGITS = 16
AT_ONCE = 4000 * DIGITS
"""Characters of digests in one broadcast."""


def check_no_process_group(what: str) -> None:
    """Raise JobError if torch.distributed has a process group: the gradients would be exchanged twice."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise JobError(
            f"{what} is to train through the servers, but this process is already rank {torch.distributed.get_rank()} "
            f"of {torch.distributed.get_world_size()} in a process group of torch.distributed: leave "
            "DistributedDataParallel, FSDP and torchrun out, and start the script with `shardline train --script`"
        )


def trains(session: Session) -> bool:
    """Return whether workers can meet at a barrier: after attach(), until the job's end."""
    return session.attached and not session.owner.ended


def other_step(session: Session, begins: int, argument: str) -> JobError:
    """The error of a Trainer that begins at another step than the job. argument: with which it resumes."""
    return JobError(
        f"the Trainer begins at step {begins}, but the job and the optimizer state on its servers are at step "
        f"{session.step}: resume both from the same step, the job with --resume, the Trainer with {argument}="
    )


def attach(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None
) -> ShardlineOptimizer:
    """Session.attach() for a model whose frozen parameters and buffers must be equal in all workers.

    attach() alone would replace them by worker/0's without a word. A worker that comes back later is not compared: its
    checkpoint may be an older one. Raises JobError naming the first tensor that differs, and what attach() raises.
    """
    names = [*_not_trained(model)] if session.num_replicas > 1 else []
    mine = "".join(_digest(model, name) for name in names)
    found = session.attach(model, optimizer, clip_norm=clip_norm)
    if session.num_replicas == 1 or session.step != session.link.orders.first_step:
        return found
    theirs = "".join(session.broadcast(mine[at : at + AT_ONCE]) for at in range(0, len(mine), AT_ONCE))
    for at, name in enumerate(names):
        where = slice(at * DIGITS, (at + 1) * DIGITS)
        if mine[where] != theirs[where]:
            raise JobError(
                f"{session.config.task}: {printable(name)}, which is not trained, had other values than in worker/0 "
                "before attach(): load the same base weights in all workers"
            )
    return found


def _not_trained(model: nn.Module) -> list[str]:
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    return [*frozen, *(name for name, _ in model.named_buffers())]


def _digest(model: nn.Module, name: str) -> str:
    owner, _, last = name.rpartition(".")
    value: torch.Tensor = getattr(model.get_submodule(owner), last)
    octets = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(octets.data)


def follow(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let an LR scheduler that was made on the inner optimizer, and those in it, change the attached one."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        follow(inner, optimizer)
