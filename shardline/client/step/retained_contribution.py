"""What a person's own loop has contributed to the open step, taken along when another server takes over.

A loop that isn't `for step in session.steps(...)` can't be made to run a step again, so what its one pass has computed
has to outlive the trainer and the segments of the timeline that it was computed in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from shardline.client.exchange.shard_exchange import StepFigures
from shardline.client.step.trainer import Trainer


class Carried:
    """One contribution, and where the job stood for whoever made it. Used by one thread.

    gradients: by tensor name; nobody writes to them until the step is closed. trainer: the one that took them.
    """

    def __init__(
        self,
        trainer: Trainer,
        replica: int,
        gradients: Mapping[str, torch.Tensor],
        *,
        loss: float | None,
        samples: int,
        hyper: Mapping[int, Mapping[str, float]] | None,
    ) -> None:
        self._replica = replica
        self._gradients = gradients
        self._loss, self._samples, self._hyper = loss, samples, hyper
        self._step = trainer.step
        self._acknowledged = dict(trainer.acknowledged)
        self._base = dict(trainer.base)
        self._buffers: dict[int, torch.Tensor] | None = None
        """Batch norm statistics and the like that belong to the contribution, by tensor number; None = not kept yet."""
        self._began_s = time.monotonic()

    def keep(self, trainer: Trainer, *, shared: bool) -> None:
        """Before the trainer that took the contribution gives it up: nothing of it may depend on that one any more.

        The model's buffers are those of theta_t again since the push began, or already those that are being pulled; the
        contribution's own are in the trainer's staging alone. shared: gradients may lie in segments of its lanes.
        """
        if self._buffers is not None:
            return
        self._buffers = trainer.staging.buffers()
        if shared:
            self._gradients = {name: gradient.detach().clone() for name, gradient in self._gradients.items()}

    def went_back(self, trainer: Trainer) -> bool:
        """Whether the job that a trainer has just located holds less than it did when the contribution was made.

        Asynchronous: of any shard, since what this loop computes next is computed with all of them.
        """
        if trainer.is_sync:
            return trainer.step < self._step
        lost = any(trainer.acknowledged[shard] < number for shard, number in self._acknowledged.items())
        return lost or any(trainer.base[shard] < version for shard, version in self._base.items())

    def counted(self, trainer: Trainer) -> bool:
        """Whether all shards have the contribution, so that only the answer was on its way."""
        if trainer.is_sync:
            return trainer.step > self._step
        return all(trainer.acknowledged[shard] > number for shard, number in self._acknowledged.items())

    def contribute(self, trainer: Trainer) -> None:
        """Contribute once more, the same bits, to the step that a trainer has located. Raises as Trainer.contribute."""
        assert self._buffers is not None
        with torch.no_grad():
            for number, values in self._buffers.items():
                held = trainer.layout.tensors[number]
                held.copy_(values.view(held.shape))
        if not trainer.is_sync:
            # Shards that have applied it know it by its number; its base is what it was computed with.
            trainer.acknowledged = dict(self._acknowledged)
            trainer.base = dict(self._base)
        trainer.contribute(
            self._replica, self._gradients, samples=self._samples, loss=self._loss, hyper=self._hyper, keep=True
        )

    def accept(self, trainer: Trainer) -> StepFigures:
        """Close the step of a contribution that is counted; the model holds what came of it already."""
        if not trainer.is_sync:
            trainer.step += 1
        seconds = time.monotonic() - self._began_s
        skipped = trainer.is_sync and trainer.stood_still(self._base)
        return StepFigures(seconds=seconds, computed_s=self._began_s, outcomes={}, skipped=skipped)
