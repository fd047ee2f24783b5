"""DC-ASGD, delay compensation: a late gradient is corrected for the parameters' change since it was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import RuleSpec, TensorSpec
from shardline.errors import JobError
from shardline.update.base import Need, Site, StateSpec
from shardline.update.elementwise import Run, moved, sent_states
from shardline.update.momentum import require_sgd
from shardline.update.wrapping import WrappingBucketRule, WrappingRule, require_real

USUAL = {"c": 0.04, "a": 2.0}
"""Strength by kind."""
_DECAY = 0.95
_EPS = 1e-7


def compensated(gradient: Tensor, moved: Tensor, strength: float | Tensor) -> Tensor:
    """G + strength * g * g * (theta - what the worker was sent): to first order the gradient at theta.

    The square of the gradient stands for the diagonal of the Hessian. `moved` is overwritten.
    """
    return gradient + moved.mul_(gradient).mul_(gradient).mul_(strength)


@dataclass(frozen=True)
class DCASGD(WrappingRule):
    """Corrects a late gradient with an estimate of the curvature (strength=-1: 0.04 with kind=c, 2 with kind=a).

    SGD steps with g + strength * g * g * (theta - what the worker was sent). With kind=a the strength of each element
    is divided by the root of a running mean of g * g, over all workers' gradients.
    """

    name: ClassVar[str] = "dc-asgd"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER, Need.PULLS})
    kind: str = "a"
    strength: float = -1.0
    decay: float = _DECAY

    def __post_init__(self) -> None:
        if self.kind not in USUAL:
            raise JobError(f"kind of {self.name} is {self.kind!r}; give c (constant strength) or a (adaptive)")
        if self.strength < 0 and self.strength != -1:
            raise JobError(
                f"strength of {self.name} is {self.strength}; give 0 or more, or -1 for the kind's usual one"
            )
        if not 0 <= self.decay < 1:
            raise JobError(f"decay of {self.name} is {self.decay}; it must be at least 0 and below 1")
        if self.kind == "c" and self.decay != _DECAY:
            raise JobError(f"{self.name} with kind=c keeps no mean, so decay={self.decay} has no meaning; leave it out")

    def check(self, spec: RuleSpec) -> None:
        """See UpdateRule. With maximize the curvature would have the wrong sign."""
        require_sgd(self, spec, off=("maximize",))

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        super().check_tensors(spec, tensors)
        require_real(self, tensors)

    def own_states(self, dtype: torch.dtype, device: torch.device) -> Mapping[str, StateSpec]:
        """See WrappingRule: what was sent to each worker; with kind=a also the running mean."""
        found = sent_states(dtype, device)
        if self.kind == "a":
            found["mean_square"] = StateSpec(dtype=torch.promote_types(dtype, torch.float32), device=device)
        return found

    def make(self, site: Site) -> DCASGDBucket:
        return DCASGDBucket(self, site)


class DCASGDBucket(WrappingBucketRule):
    def __init__(self, rule: DCASGD, site: Site) -> None:
        super().__init__(rule, site)
        self._adaptive = rule.kind == "a"
        self._strength = USUAL[rule.kind] if rule.strength < 0 else rule.strength
        self._decay = rule.decay

    def changed(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> Tensor:
        strength: float | Tensor = self._strength
        if self._adaptive:
            mean = run.state("mean_square")
            gradient = run.gradient.to(mean.dtype)
            mean.mul_(self._decay).addcmul_(gradient, gradient, value=1 - self._decay)
            strength = self._strength / (mean + _EPS).sqrt_()
        since = moved(run)
        return run.gradient if since is None else compensated(run.gradient, since, strength)
