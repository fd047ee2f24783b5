"""DANA: a momentum per worker, and pulls of the point that all of them together lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec
from shardline.errors import JobError
from shardline.update.base import BucketRule, Need, Site, StateSpec
from shardline.update.dc_asgd import compensated
from shardline.update.elementwise import Run, moved, sent_states
from shardline.update.momentum import LookAheadBucketRule, MomentumBucketRule, MomentumRule, rate_states

_STRENGTH = 2.0


@dataclass(frozen=True)
class DANA(MomentumRule):
    """A momentum per worker, and pulls ahead along all of them (kind=zero, slim: in the parameters, dc: compensated).

    kind=zero: v_i = momentum * v_i + g; theta = theta - rate * v_i; a pull gets theta - rate * momentum * V, where V is
    the sum of all v_i. kind=dc: the same with g + strength * g * g * (theta - what the worker was sent) for g.

    kind=slim: v_i = momentum * v_i + g; Theta = Theta - rate * (g + momentum * v_i); a pull gets Theta, without any
    computation. At a constant rate and without weight decay Theta is what workers of kind=zero pull. When the rate
    changes, the two part by (old - new) * momentum * V: kind=slim goes on as SGD with nesterov=True does. The paper
    has each worker keep its v_i and push g + momentum * v_i; here the server keeps it, so that it is in every cut and
    on the standby, and the codec sees plain gradients.

    When a worker leaves, V loses its v_i. Theta keeps rate * momentum * v_i, the step that v_i was about to make: it
    fades as any other step does.
    """

    name: ClassVar[str] = "dana"
    kind: str = "slim"
    strength: float = _STRENGTH

    def __post_init__(self) -> None:
        if self.kind not in ("zero", "slim", "dc"):
            raise JobError(f"kind of {self.name} is {self.kind!r}; give zero, slim or dc")
        if self.strength < 0:
            raise JobError(f"strength of {self.name} is {self.strength}; it must be at least 0")
        if self.kind != "dc" and self.strength != _STRENGTH:
            raise JobError(
                f"{self.name} with kind={self.kind} compensates nothing, so strength={self.strength} has no meaning; "
                "leave it out, or choose kind=dc"
            )

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.WORKER, Need.PULLS} if self.kind == "dc" else {Need.WORKER})

    @property
    def looks_ahead(self) -> bool:
        return self.kind != "slim"

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule: each v_i; but for kind=slim also V, in float64 so that no error adds up in it."""
        found = {"momentum_buffer": StateSpec(dtype=dtype, device=device, per_worker=True)}
        if self.kind != "slim":
            found |= {"momentum_sum": StateSpec(dtype=torch.float64, device=device), **rate_states(device)}
        if self.kind == "dc":
            found |= sent_states(dtype, device)
        return found

    def make(self, site: Site) -> BucketRule:
        if self.kind == "slim":
            return DANASlimBucket(self, site)
        return DANAZeroBucket(self, site) if self.kind == "zero" else DANADCBucket(self, site)


class DANASlimBucket(MomentumBucketRule):
    """The momenta of one bucket whose values are the point ahead."""

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        self.step(run, run.gradient, arguments, nesterov=True)


class DANAZeroBucket(LookAheadBucketRule):
    """The momenta of one bucket, and their sum."""

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        self.push(run, run.gradient, arguments)

    def push(self, run: Run, gradient: Tensor, arguments: Mapping[str, Any]) -> None:
        own, total = run.state("momentum_buffer"), run.state("momentum_sum")
        total.sub_(own)
        self.step(run, gradient, arguments)
        total.add_(own)

    def ahead(self, run: Run, rate: float, momentum: float) -> tuple[float, Tensor]:
        return rate * momentum, run.state("momentum_sum")

    def left(self, worker: str) -> None:
        """See BucketRule. Otherwise the others would look ahead along its momentum for ever."""
        if worker in self.workers:
            self.kept.tensor("momentum_sum").sub_(self.kept.tensor("momentum_buffer", worker))
        super().left(worker)


class DANADCBucket(DANAZeroBucket):
    """The same with delay compensation."""

    def __init__(self, rule: DANA, site: Site) -> None:
        super().__init__(rule, site)
        self._strength = rule.strength

    def update(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> None:
        since = moved(run)
        gradient = run.gradient if since is None else compensated(run.gradient, since, self._strength)
        self.push(run, gradient, arguments)
