"""SlowMo: many local steps, then an outer step with momentum, in units of the inner learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from shardline.cadence.base import Held, LocalTraining, Outgoing, Values
from shardline.cadence.local_training import LocalCadence, LocalCopies
from shardline.core.spec import Argument
from shardline.errors import JobError


@dataclass(frozen=True)
class SlowMo(LocalCadence):
    """Run the job's optimizer on each worker for `every` passes, then take an outer step with slow momentum."""

    name: ClassVar[str] = "slowmo"
    every: int = 48
    outer_lr: float = 1.0
    outer_momentum: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.outer_lr < math.inf:
            raise JobError(f"cadence slowmo: outer_lr is {self.outer_lr}; give a finite number above 0, such as 1")
        if not 0.0 <= self.outer_momentum < 1.0:
            raise JobError(
                f"cadence slowmo: outer_momentum is {self.outer_momentum}; give a number from 0 to below 1, such as 0.5"
            )

    @property
    def outer_rule(self) -> Mapping[str, Argument]:
        return {"lr": float(self.outer_lr), "momentum": float(self.outer_momentum)}

    def local(self, held: Held) -> LocalTraining:
        assert held.inner is not None, "a cadence with an outer rule gets the job's optimizer"
        return SlowCopies(self, held, held.inner)


class SlowCopies(LocalCopies):
    """Sends deltas divided by the inner learning rate, and that rate for the outer step.

    So the momentum keeps its effect when the inner rate changes (Wang et al.: SlowMo, ICLR 2020, Algorithm 1).
    """

    _cadence: SlowMo

    def finish(self, replica: int, sent: Outgoing, now: Values) -> Outgoing:
        """See LocalCopies.finish. With a rate of 0 nothing has moved."""
        rates = self._inner.rates
        groups = {spec.name: spec.group for spec in self._held.specs}
        return replace(
            sent,
            values={name: value / (rates[groups[name]] or 1.0) for name, value in sent.values.items()},
            hyper={group: {"lr": self._cadence.outer_lr * rate} for group, rate in rates.items()},
        )
