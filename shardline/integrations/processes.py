"""What all doors need: refuse a second way to train in several processes, and compare what the servers do not hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash
from torch import nn

from shardline.client.api.session import Session
from shardline.errors import JobError
from shardline.host.printable import printable


def check_no_process_group(what: str) -> None:
    """Raise JobError if torch.distributed has a process group: the gradients would be exchanged twice."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise JobError(
            f"{what} is to train through the servers, but this process is already rank {torch.distributed.get_rank()} "
            f"of {torch.distributed.get_world_size()} in a process group of torch.distributed: leave "
            "DistributedDataParallel, FSDP and torchrun out, and start the script with `shardline train --script`"
        )


def check_frozen(session: Session, model: nn.Module) -> None:
    """Compare frozen parameters and buffers with worker/0's; call after attach(). Raises JobError naming the first.

    The servers hold only what is trained, so nothing else would make the rest equal. A worker that comes back later is
    not compared: its buffers may have moved on.
    """
    if session.num_replicas == 1 or session.step != session.link.orders.first_step:
        return
    mine = dict(_frozen(model))
    theirs: dict[str, str] = dict(zip(*session.broadcast([[*mine], [*mine.values()]]), strict=True))
    for name in [*mine, *theirs]:
        if mine.get(name) != theirs.get(name):
            missing = "worker/0 has none" if name not in theirs else "this worker has none" if name not in mine else ""
            raise JobError(
                f"{session.config.task}: {printable(name)}, which is not trained, has other values than in worker/0"
                f"{f' ({missing})' if missing else ''}: load the same base weights in all workers before attach()"
            )


def _frozen(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and digest of each tensor that is not trained."""
    tensors = [(name, value) for name, value in model.named_parameters() if not value.requires_grad]
    for name, value in [*tensors, *model.named_buffers()]:
        octets = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield name, xxhash.xxh3_64_hexdigest(octets.data)
