"""NAG-ASGD: Nesterov's momentum with one momentum for all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec
from shardline.update.base import Site, StateSpec
from shardline.update.elementwise import Run
from shardline.update.momentum import LookAheadBucketRule, MomentumRule, rate_states


@dataclass(frozen=True)
class NAGASGD(MomentumRule):
    """One momentum for all workers; a pull looks one step ahead along it.

    v = momentum * v + g; theta = theta - rate * v; a pull gets theta - rate * momentum * v. With one worker its
    parameters are those of SGD with nesterov=True.
    """

    name: ClassVar[str] = "nag-asgd"
    looks_ahead: ClassVar[bool] = True

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: v, and the rate of the last push."""
        return {"momentum_buffer": StateSpec(dtype=dtype, device=device), **rate_states(device)}

    def make(self, site: Site) -> NAGASGDBucket:
        return NAGASGDBucket(self, site)


class NAGASGDBucket(LookAheadBucketRule):
    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        self.step(run, run.gradient, arguments)

    def ahead(self, run: Run, rate: float, momentum: float) -> tuple[float, Tensor]:
        return rate * momentum, run.state("momentum_buffer")
