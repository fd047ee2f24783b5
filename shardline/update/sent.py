"""What was sent to each worker at its last pull, for rules that ask how far the parameters have moved since."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.update.base import StateSpec
from shardline.update.elementwise import Run, States


def sent_states(dtype: torch.dtype, device: torch.device) -> dict[str, StateSpec]:
    """The states of RemembersPulls: the values, and a flag per slice that says whether there are any."""
    return {
        "sent": StateSpec(dtype=dtype, device=device, per_worker=True),
        "was_sent": StateSpec(dtype=torch.float64, device=device, scalar=True, per_worker=True),
    }


class RemembersPulls:
    """A part of bucket rules that need Need.PULLS; it comes first among their bases."""

    kept: States

    def sent(self, worker: str, values: Tensor) -> None:
        self.kept.tensor("sent", worker).copy_(values)
        numbers = self.kept.numbers("was_sent", worker)
        numbers[:] = [1.0] * len(numbers)


def moved(run: Run) -> Tensor | None:
    """The parameters minus what the pusher was last sent, a new tensor; None if it was sent nothing."""
    return run.values - run.state("sent") if run.number("was_sent") else None
