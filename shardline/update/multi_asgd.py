from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec
from shardline.update.base import Need, Site, StateSpec
from shardline.update.elementwise import Run
from shardline.update.momentum import MomentumBucketRule, MomentumRule


@dataclass(frozen=True)
class MultiASGD(MomentumRule):
    """A momentum per worker, of its own gradients only.

    v_i = momentum * v_i + g; theta = theta - rate * v_i. A worker that leaves takes its momentum along; the parameters
    stay.
    """

    name: ClassVar[str] = "multi-asgd"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER})

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: each worker's momentum."""
        return {"momentum_buffer": StateSpec(dtype=dtype, device=device, per_worker=True)}

    def make(self, site: Site) -> MultiASGDBucket:
        return MultiASGDBucket(self, site)


class MultiASGDBucket(MomentumBucketRule):
    """The momenta of one bucket."""

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        self.step(run, run.gradient, arguments)
