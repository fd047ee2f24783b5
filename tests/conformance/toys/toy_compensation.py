"""A rule from outside the package that changes gradients and leaves the step to the job's optimizer.

Delay compensation with a constant strength (Zheng et al. 2017, "Asynchronous stochastic gradient descent with delay
compensation", algorithm 2): g + strength * g * g * (theta - what the worker was sent).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.update import RULES, Need
from shardline.update.base import Site, StateSpec
from shardline.update.elementwise import Run
from shardline.update.wrapping import WrappingBucketRule, WrappingRule


@RULES.add
@dataclass(frozen=True)
class ToyCompensation(WrappingRule):
    """Corrects a late gradient for the parameters' change since, with an estimate of the curvature."""

    name: ClassVar[str] = "toy-compensation"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER, Need.PULLS})
    strength: float = 0.04

    def own_states(self, dtype: torch.dtype, device: torch.device) -> Mapping[str, StateSpec]:
        """See WrappingRule: the values sent to each worker, and a flag per slice that says whether they were."""
        return {
            "sent": StateSpec(dtype=dtype, device=device, per_worker=True),
            "was_sent": StateSpec(dtype=torch.float64, device=device, scalar=True, per_worker=True),
        }

    def make(self, site: Site) -> ToyCompensationBucket:
        """See UpdateRule."""
        return ToyCompensationBucket(self, site, self.strength)


class ToyCompensationBucket(WrappingBucketRule):
    """The values of one bucket sent to each worker."""

    def __init__(self, rule: ToyCompensation, site: Site, strength: float) -> None:
        super().__init__(rule, site)
        self._strength = strength

    def sent(self, worker: str, values: Tensor) -> None:
        """See BucketRule."""
        self.kept.tensor("sent", worker).copy_(values)
        numbers = self.kept.numbers("was_sent", worker)
        numbers[:] = [1.0] * len(numbers)

    def changed(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> Tensor:
        """See WrappingBucketRule."""
        if not run.number("was_sent"):
            return run.gradient
        guess = run.gradient.square().mul_(run.values - run.state("sent"))
        return run.gradient.add(guess, alpha=self._strength)
