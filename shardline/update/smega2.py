from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec
from shardline.update.base import Need, Site, StateSpec
from shardline.update.elementwise import Run
from shardline.update.momentum import LookAheadBucketRule, MomentumRule, rate_states


@dataclass(frozen=True)
class SMEGA2(MomentumRule):
    """One momentum for all workers, moved once per round of as many pushes; a pull looks a round ahead.

    Each push: theta = theta - rate * (g + momentum * v), and G = G + g. A round ends with as many pushes as there are
    workers that have pushed: v = momentum * v + G / pushes, and G = 0. When workers leave, the open round ends with the
    next push if it has enough of them, so its mean is still of the pushes that it holds.
    """

    name: ClassVar[str] = "smega2"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER})
    looks_ahead: ClassVar[bool] = True

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: v, G and the pushes in it, who has pushed, and the rate of the last push."""
        return {
            "momentum_buffer": StateSpec(dtype=dtype, device=device),
            "gradient_sum": StateSpec(dtype=dtype, device=device),
            "gradients": StateSpec(dtype=torch.float64, device=device, scalar=True),
            "pushed": StateSpec(dtype=torch.float64, device=device, scalar=True, per_worker=True),
            **rate_states(device),
        }

    def make(self, site: Site) -> SMEGA2Bucket:
        return SMEGA2Bucket(self, site)


class SMEGA2Bucket(LookAheadBucketRule):
    """The momentum and the open round of one bucket."""

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        momentum, gradient = arguments["momentum"], run.gradient
        if arguments["weight_decay"]:
            gradient = gradient.add(run.values, alpha=arguments["weight_decay"])
        buffer, total = run.state("momentum_buffer"), run.state("gradient_sum")
        run.values.sub_(gradient.add(buffer, alpha=momentum), alpha=arguments["lr"])
        total.add_(gradient)
        run.set_number("pushed", 1.0)
        pushes = run.number("gradients") + 1
        if pushes >= run.workers_with("pushed"):
            buffer.mul_(momentum).add_(total, alpha=1 / pushes)
            total.zero_()
            pushes = 0
        run.set_number("gradients", pushes)
        self.note_rate(run, arguments)

    def ahead(self, run: Run, rate: float, momentum: float) -> tuple[float, Tensor]:
        """See LookAheadBucketRule: the rest of the round moves along v, and as many pushes of the next along its v."""
        workers = max(1, run.workers_with("pushed"))
        pushes = min(run.number("gradients"), workers)
        direction = run.state("gradient_sum") * (pushes / workers)
        direction.add_(run.state("momentum_buffer"), alpha=workers + pushes * (momentum - 1))
        return rate * momentum, direction
