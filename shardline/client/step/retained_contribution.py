"""A contribution of the user's own loop to the open step, kept when another server takes over.

A loop that isn't `for step in session.steps(...)` can't repeat a step, so the result of its one pass has to outlive the
trainer and the segments of the timeline in which it was computed.
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
    """A contribution to one step, and the worker's position at that time. Used by one thread.

    parts: by replica.
    """

    def __init__(self, mark: ComputedAt, parts: Mapping[int, Outgoing]) -> None:
        self._mark = mark
        self._parts = {replica: part if part.keep else _copied(part) for replica, part in parts.items()}
        self._kept = False
        self._began_s = time.monotonic()

    def keep(self, trainer: Trainer, *, shared: bool) -> None:
        """Make the contribution independent of the trainer that took it; call before that trainer gives it up.

        Since the push began, the model's buffers are those of theta_t again, or already those being pulled; the
        contribution's own are only in the trainer's staging. shared: gradients may be in segments of its lanes.
        """
        if self._kept:
            return
        self._kept = True
        buffers = trainer.open.kept_buffers()
        for replica, part in self._parts.items():
            own = {name: buffers[name] for name in part.buffers if name in buffers}
            self._parts[replica] = replace(_copied(part) if shared else part, buffers=own, keep=True)

    def went_back(self, half: WorkerHalf) -> bool:
        """Whether the job, as just located, is behind the step of the contribution."""
        return half.went_back(self._mark)

    def counted(self, half: WorkerHalf) -> bool:
        """Whether all shards have counted the contribution, so that only the answer is missing."""
        return half.counted(self._mark)

    def contribute(self, trainer: Trainer) -> None:
        """Contribute the same bits again to the step that a trainer has located. Raises like Trainer.contribute."""
        trainer.half.resume(self._mark)
        for replica, part in self._parts.items():
            trainer.hand_over(replica, part)

    def accept(self, half: WorkerHalf) -> StepFigures:
        """Close the step of a contribution that is counted; the model already contains the result."""
        skipped = half.accept(self._mark)
        return StepFigures(
            seconds=time.monotonic() - self._began_s, computed_s=self._began_s, outcomes={}, skipped=skipped
        )


def _copied(part: Outgoing) -> Outgoing:
    return replace(part, values={name: gradient.detach().clone() for name, gradient in part.values.items()}, keep=True)
