"""A rule from outside the package: a momentum per worker, and pulls that look ahead along all of them.

DANA-Zero (Hakimi et al. 2019, "Taming momentum in a distributed asynchronous environment", algorithm 4), without weight
decay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec
from shardline.errors import JobError
from shardline.update import RULES, Need
from shardline.update.base import Site, StateSpec
from shardline.update.elementwise import ElementwiseBucketRule, ElementwiseRule, Run


@RULES.add
@dataclass(frozen=True)
class ToyMomentum(ElementwiseRule):
    """A momentum per worker; workers pull the point that all of them lead to."""

    name: ClassVar[str] = "toy-momentum"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER})
    looks_ahead: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise JobError(f"momentum of {self.name} is {self.momentum}; it must be at least 0 and below 1")

    def check(self, spec: RuleSpec) -> None:
        """See UpdateRule: refuses an optimizer with momentum, since it has its own."""
        if spec.name != "SGD":
            raise JobError(f"{self} takes the learning rate of SGD; the job's optimizer is {spec.name}")

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: v of each worker, their sum, the number of each worker's pushes, and the last rate."""
        return {
            "velocity": StateSpec(dtype=dtype, device=device, per_worker=True),
            "velocities": StateSpec(dtype=dtype, device=device),
            "pushes": StateSpec(dtype=torch.float64, device=device, scalar=True, per_worker=True),
            "rate": StateSpec(dtype=torch.float64, device=device, scalar=True),
        }

    def make(self, site: Site) -> ToyMomentumBucket:
        """See UpdateRule."""
        return ToyMomentumBucket(self, site, self.momentum)


class ToyMomentumBucket(ElementwiseBucketRule):
    """The momenta of one bucket."""

    def __init__(self, rule: ToyMomentum, site: Site, momentum: float) -> None:
        super().__init__(rule, site)
        self._momentum = momentum

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        """See ElementwiseBucketRule."""
        velocity, total = run.state("velocity"), run.state("velocities")
        total.sub_(velocity)
        velocity.mul_(self._momentum).add_(run.gradient)
        total.add_(velocity)
        run.values.sub_(velocity, alpha=arguments["lr"])
        run.set_number("pushes", run.number("pushes") + 1)
        run.set_number("rate", arguments["lr"])

    def answer(self, values: Tensor, worker: str) -> Tensor:
        """See BucketRule: theta - rate * momentum * (v_1 + ... + v_W)."""
        ahead, total = values.clone(), self.kept.tensor("velocities")
        for piece, rate in zip(self.site.bucket.slices, self.kept.numbers("rate"), strict=True):
            ahead[piece.offset : piece.end].sub_(total[piece.offset : piece.end], alpha=rate * self._momentum)
        return ahead

    def left(self, worker: str) -> None:
        """See BucketRule: otherwise the others would look ahead along its momentum for ever."""
        if worker in self.workers:
            self.kept.tensor("velocities").sub_(self.kept.tensor("velocity", worker))
        super().left(worker)
