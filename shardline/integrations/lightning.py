"""Lightning on a cluster: `L.Trainer(strategy=ShardlineStrategy(), ...)`, and the script stays as it is."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import shardline
from shardline.client.api.optimizer import ShardlineOptimizer
from shardline.client.api.session import Session
from shardline.errors import JobError
from shardline.integrations.processes import attach, check_no_process_group, follow, other_step, trains


class ShardlineEnvironment(ClusterEnvironment):
    """A worker's place as Lightning asks for it: its replica is its rank, on a node with one process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    creates_processes_externally = True
    main_address = ""
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Never: it is named by ShardlineStrategy."""
        return False

    def world_size(self) -> int:
        return self._session.num_replicas

    def set_world_size(self, size: int) -> None:
        """Nothing: the cluster says it."""

    def global_rank(self) -> int:
        return self._session.replica

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the cluster says it."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self._session.replica


class ShardlineStrategy(ParallelStrategy):
    """Puts the parameters of the one optimizer on the servers; `session` is the worker's session.

    Training data are split by replica; each replica validates all of its data, with the results of the others, since
    the models are equal. gradient_clip_val is the norm to which the servers clip. settings: of shardline.connect(),
    such as checkpoint_every, or nan_policy="skip" for a precision with a scaler. Raises JobError where
    torch.distributed is in use, for a second model in this process, and where only one of the job and the Trainer
    resumes.
    """

    _held: Session | None = None
    """The session of the last strategy made."""

    def __init__(self, **settings: Any) -> None:
        check_no_process_group(type(self).__name__)
        if ShardlineStrategy._held is not None and not ShardlineStrategy._held.owner.ended:
            raise JobError(
                f"a ShardlineStrategy already trains as {ShardlineStrategy._held.config.task}, and a worker's process "
                "trains one model: give it to one Trainer, and train the next model in a script of its own"
            )
        self.session: Session = shardline.connect(**settings)
        ShardlineStrategy._held = self.session
        super().__init__(cluster_environment=ShardlineEnvironment(self.session))

    # Places

    @property
    def is_distributed(self) -> bool:
        """True while data are split: in training only."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return self.world_size > 1 and (trainer is None or not (trainer.evaluating or trainer.predicting))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        return self.session.device if self.session.device.type == "cuda" else self.parallel_devices[0]

    def set_world_ranks(self) -> None:
        """Let replica 0 alone print and save."""
        rank_zero_only.rank = self.global_rank

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    # Training

    def setup_optimizers(self, trainer: Any) -> None:
        if self.session.attached:
            raise JobError(
                f"this ShardlineStrategy has already trained a model as {self.session.config.task}, and a job trains "
                "one: train the next model in a script of its own"
            )
        super().setup_optimizers(trainer)
        made: list[Any] = self.optimizers
        if len(made) != 1 or isinstance(made[0], ShardlineOptimizer):
            raise JobError(
                f"configure_optimizers() returned {len(made)} optimizers; ShardlineStrategy trains with one "
                "of torch.optim, which it attaches itself"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise JobError(
                'gradient_clip_algorithm="value" can\'t be done by the servers, which clip the norm of the mean '
                'gradient: use "norm"'
            )
        attached = attach(self.session, self.lightning_module, made[0], clip_norm=trainer.gradient_clip_val)
        # Clipping a replica's own gradient, too, would give another result.
        trainer.gradient_clip_val = None
        self.optimizers: Any = [attached]
        for config in self.lr_scheduler_configs:
            follow(config.scheduler, attached)

    def on_train_start(self) -> None:
        """Raise JobError if only one of the job and the Trainer resumes."""
        begins, step = self.lightning_module.trainer.global_step, self.session.step
        if begins != step == self.session.link.orders.first_step and self.session.trainer.half.shares_steps:
            raise other_step(self.session, begins, "ckpt_path")

    # Between replicas

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers, from the time on when the optimizer is attached."""
        if trains(self.session):
            self.session.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return replica 0's value, a path or JSON; before the optimizer is attached, the replica's own."""
        if src != 0:
            raise JobError(f"broadcast() can send a value of replica 0 only; it was asked for one of replica {src}")
        obj = os.fspath(obj) if isinstance(obj, os.PathLike) else obj
        return self.session.broadcast(obj) if trains(self.session) else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return replica 0's decision, which is that of all if it follows from the validation."""
        return bool(self.broadcast(bool(decision)))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the replica's own value: those of a validation are equal anyway."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Refused with JobError where there are several replicas, since nothing connects them but the servers."""
        if self.world_size > 1:
            raise JobError(
                "all_gather() can't collect tensors of other replicas; each replica validates all data, so use its own"
            )
        return tensor.unsqueeze(0)
