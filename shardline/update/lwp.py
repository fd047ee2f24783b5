"""LWP, linear weight prediction: a pull gets the parameters as they will be when its gradient is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec
from shardline.errors import JobError
from shardline.update.base import Need, Site, StateSpec
from shardline.update.elementwise import Run
from shardline.update.momentum import LookAheadBucketRule, MomentumRule, rate_states


@dataclass(frozen=True)
class LWP(MomentumRule):
    """One momentum for all workers; a pull looks ahead by as many steps as a push will be late (lag=0: automatic).

    v = momentum * v + g; theta = theta - rate * v; a pull gets theta - lag * rate * v. The automatic lag is the mean
    one: the number of workers that have pushed, less one.
    """

    name: ClassVar[str] = "lwp"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER})
    looks_ahead: ClassVar[bool] = True
    lag: int = 0

    def __post_init__(self) -> None:
        if self.lag < 0:
            raise JobError(f"lag of {self.name} is {self.lag}; give the steps to look ahead, or 0 for automatic")

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: v, the rate of the last push, and who has pushed."""
        return {
            "momentum_buffer": StateSpec(dtype=dtype, device=device),
            "pushed": StateSpec(dtype=torch.float64, device=device, scalar=True, per_worker=True),
            **rate_states(device),
        }

    def make(self, site: Site) -> LWPBucket:
        return LWPBucket(self, site, self.lag)


class LWPBucket(LookAheadBucketRule):
    def __init__(self, rule: LWP, site: Site, lag: int) -> None:
        super().__init__(rule, site)
        self._lag = lag

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        self.step(run, run.gradient, arguments)
        run.set_number("pushed", 1.0)

    def ahead(self, run: Run, rate: float, momentum: float) -> tuple[float, Tensor]:
        lag = self._lag or max(0, run.workers_with("pushed") - 1)
        return lag * rate, run.state("momentum_buffer")
