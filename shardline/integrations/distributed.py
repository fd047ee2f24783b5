"""Scripts written for DistributedDataParallel, on a cluster: three lines change, and the loop stays as it is.

shardline.init_process_group()                            # for torch.distributed.init_process_group("nccl")
model = shardline.DistributedModel(model)                 # for DistributedDataParallel(model)
optimizer = shardline.DistributedOptimizer(optimizer, model)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from shardline.client.api.connect import connect
from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.errors import JobError
from shardline.integrations.processes import attach, check_no_process_group, trains

BACKEND = "shardline"


class _Done(dist.Work):
    """A collective that is finished when it returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class ServersGroup(dist.ProcessGroup):
    """The workers as ranks of torch.distributed. They exchange nothing but barriers and small tensors of rank 0."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.replica, session.num_replicas)  # type: ignore[call-arg]
        self.session = session

    def getBackendName(self) -> str:
        return BACKEND

    def barrier(self, opts: Any = None) -> dist.Work:
        if trains(self.session):
            self.session.barrier()
        return _Done()

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Copy rank 0's values, at most 65,536 characters of JSON. Raises JobError for another rank's, UsageError."""
        if opts is not None and opts.rootRank != 0:
            raise JobError(f"dist.broadcast() can send tensors of rank 0 only; it was asked for rank {opts.rootRank}'s")
        for tensor in tensors:
            values = self.session.broadcast(tensor.flatten().tolist())
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape))
        return _Done()

    def _refuse(self, *args: Any, **named: Any) -> NoReturn:
        raise JobError(
            "torch.distributed can't reduce or gather between Shardline's workers: gradients go to the servers, and "
            "other values are each replica's own; leave dist.all_reduce(), dist.all_gather() and the like out"
        )

    allreduce = allreduce_coalesced = allgather = _allgather_base = gather = reduce = reduce_scatter = _refuse
    scatter = alltoall = alltoall_base = send = recv = _refuse


def init_process_group(**settings: Any) -> Session:
    """Take this process's place in the cluster; torch.distributed then has the replica as rank. Returns the session.

    DistributedSampler, get_rank(), get_world_size() and barrier() work as usual. settings: those of connect(). Raises
    JobError if there is a process group already.
    """
    check_no_process_group("init_process_group()")
    session: Session = connect(**settings)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda *_: ServersGroup(_latest[-1]), devices=["cpu", "cuda"])
    _latest[:] = [session]
    dist.init_process_group(BACKEND, store=HashStore(), rank=session.replica, world_size=session.num_replicas)
    return session


_latest: list[Session] = []
"""The session of the process group that is made next, or was made last."""


class DistributedModel(nn.Module):
    """The model in the place of DistributedDataParallel(model), which is `module`; `session` is the worker's session.

    Its gradients stay this replica's own until the optimizer's step. Raises JobError for a model in DDP.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise JobError(
                "DistributedModel() was given a model in DistributedDataParallel, whose processes would exchange the "
                "gradients once more: give it the model itself"
            )
        self.module = module
        if not _latest or _latest[-1].owner.ended:
            _latest[:] = [connect()]
        self.session = _latest[-1]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: gradients are sent when the optimizer steps."""
        return contextlib.nullcontext()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, model: DistributedModel, *, clip_norm: float | None = None
) -> ShardlineOptimizer:
    """Attach the model with its optimizer: Session.attach. clip_norm: in place of clip_grad_norm_() in the loop.

    Raises JobError if frozen weights differ between workers, and whatever attach() raises.
    """
    if not isinstance(model, DistributedModel):
        raise JobError(
            f"DistributedOptimizer() was given a {type(model).__name__} as model: give it the DistributedModel"
        )
    return attach(model.session, model.module, optimizer, clip_norm=clip_norm)
