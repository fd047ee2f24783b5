"""What a person's own loop has contributed to the open step, taken along when another server takes over.

A loop that isn't `for step in session.steps(...)` can't be made to run a step again, so what its one pass has computed
has to outlive the trainer and the segments of the timeline that it was computed in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from shardline.cadence import Outgoing
from shardline.client.exchange.outcomes import StepFigures
from shardline.client.step.trainer import Trainer
from shardline.consistency.worker import ComputedAt
from shardline.consistency.worker.base import WorkerHalf


class RetainedContribution:
    """What was contributed to one step, and where the worker stood. Used by one thread.

    parts: by replica.
    """

    def __init__(self, mark: ComputedAt, parts: Mapping[int, Outgoing]) -> None:
        self._mark = mark
        self._parts = {replica: part if part.keep else _copied(part) for replica, part in parts.items()}
        self._kept = False
        self._began_s = time.monotonic()

    def keep(self, trainer: Trainer, *, shared: bool) -> None:
        """Before the trainer that took the contribution gives it up: nothing of it may depend on that one any more.

        The model's buffers are those of theta_t again since the push began, or already those that are being pulled; the
        contribution's own are in the trainer's staging alone. shared: gradients may lie in segments of its lanes.
        """
        if self._kept:
            return
        self._kept = True
        buffers = trainer.open.kept_buffers()
        for replica, part in self._parts.items():
            own = {name: buffers[name] for name in part.buffers if name in buffers}
            self._parts[replica] = replace(_copied(part) if shared else part, buffers=own, keep=True)

    def went_back(self, half: WorkerHalf) -> bool:
        """Whether the job that was just located holds less than it did when the contribution was made."""
        return half.went_back(self._mark)

    def counted(self, half: WorkerHalf) -> bool:
        """Whether all shards have the contribution, so that only the answer was on its way."""
        return half.counted(self._mark)

    def contribute(self, trainer: Trainer) -> None:
        """Contribute once more, the same bits, to the step that a trainer has located. Raises as Trainer.contribute."""
        trainer.half.resume(self._mark)
        for replica, part in self._parts.items():
            trainer.hand_over(replica, part)

    def accept(self, half: WorkerHalf) -> StepFigures:
        """Close the step of a contribution that is counted; the model holds what came of it already."""
        skipped = half.accept(self._mark)
        return StepFigures(
            seconds=time.monotonic() - self._began_s, computed_s=self._began_s, outcomes={}, skipped=skipped
        )


def _copied(part: Outgoing) -> Outgoing:
    return replace(part, values={name: gradient.detach().clone() for name, gradient in part.values.items()}, keep=True)
