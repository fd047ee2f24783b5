"""accelerate on a cluster: a script imports Accelerator from here, and otherwise stays as it is."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import nn

import shardline
from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.errors import JobError
from shardline.integrations.processes import attach, check_no_process_group, follow, trains


def take_place(session: Session) -> None:
    """Let accelerate split data, print and save as process `replica` of `num_replicas`.

    It has no process group, so that it wraps no model and exchanges nothing.
    """
    PartialState()
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state:
            state.update(
                num_processes=session.num_replicas,
                process_index=session.replica,
                local_process_index=session.replica,
            )


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator whose prepare(model, optimizer, ...) puts the parameters on the servers.

    clip_norm: norm to which the servers clip the mean gradient, in place of clip_grad_norm_() in the loop. Other
    arguments are accelerate's; the job's settings come from `shardline train` and the environment.
    """

    def __init__(self, *args: Any, clip_norm: float = 0.0, **named: Any) -> None:
        check_no_process_group("Accelerator")
        self._clip_norm = clip_norm
        mixed = named.get("mixed_precision")
        self.session = shardline.connect(clip_norm=clip_norm, nan_policy="skip" if mixed == "fp16" else "stop")
        super().__init__(*args, **named)
        take_place(self.session)
        # Otherwise the first process reads a stream for all, and would have to send the batches.
        self.dataloader_config.dispatch_batches = False

    def prepare(self, *args: Any, **named: Any) -> Any:
        """As in accelerate. Raises JobError for an optimizer without its model in the same call."""
        models = [item for item in args if isinstance(item, nn.Module)]

        def attached(inner: torch.optim.Optimizer) -> ShardlineOptimizer:
            if len(models) != 1:
                raise JobError(
                    f"accelerator.prepare() was given an optimizer and {len(models)} models; give it the optimizer "
                    "and the one model that it trains in one call"
                )
            found = attach(self.session, models[0], inner)
            for item in args:
                if isinstance(item, torch.optim.lr_scheduler.LRScheduler) and item.optimizer is inner:
                    follow(item, found)
            return found

        def is_plain(item: Any) -> bool:
            wrapped = (ShardlineOptimizer, accelerate.optimizer.AcceleratedOptimizer)
            return isinstance(item, torch.optim.Optimizer) and not isinstance(item, wrapped)

        return super().prepare(*(attached(item) if is_plain(item) else item for item in args), **named)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Return this replica's norm: the servers clip. Raises JobError for another norm than theirs."""
        if (float(max_norm), float(norm_type)) != (float(self._clip_norm), 2.0) and max_norm != float("inf"):
            raise JobError(
                f"clip_grad_norm_() was called with {max_norm:g}, but the servers clip the mean gradient of all "
                f"replicas to clip_norm={self._clip_norm:g} (0 = not at all): make them equal with "
                f"Accelerator(clip_norm={max_norm:g})"
            )
        found: torch.Tensor = super().clip_grad_norm_(parameters, float("inf"), 2)
        return found

    def wait_for_everyone(self) -> None:
        """Wait at a barrier for all workers, once the optimizer is prepared."""
        if trains(self.session):
            self.session.barrier()

    def gather(self, tensor: Any) -> Any:
        """Return the tensor, of a DataLoader that is not prepared. Raises JobError for a replica's part."""
        if self.session.num_replicas > 1 and self.gradient_state.active_dataloader is not None:
            raise JobError(
                "gather() and gather_for_metrics() can't collect tensors of other replicas: leave the DataLoader of an "
                "evaluation out of prepare(), so that each replica evaluates all of it with the same result"
            )
        return super().gather(tensor)
