"""Gap-aware SGD: a gradient is divided by how far the parameters have moved since, in average steps.

Barkai et al.: Gap-Aware Mitigation of Gradient Staleness (2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec, TensorSpec
from shardline.errors import JobError
from shardline.update.base import Need, Site, StateSpec, Update
from shardline.update.elementwise import Run, moved, sent_states
from shardline.update.wrapping import WrappingBucketRule, WrappingRule, require_real

_EPS = 1e-8
_DECOUPLED = ("AdamW", "Muon", "Adafactor")
"""Optimizers that decay the weights apart from the gradient; others may have an argument that says so."""


def is_decoupled(name: str, group: Mapping[str, Argument]) -> bool:
    """Whether an optimizer decays the weights apart from the gradient."""
    return name in _DECOUPLED or bool(group.get("decoupled_weight_decay"))


def average_step(mean: Tensor, steps: float, decay: float, rate: float) -> Tensor:
    """How far parameters move in an average step. mean: of squared steps by rate, of so many steps, not corrected."""
    average: Tensor = (mean / (1 - decay**steps)).sqrt_().add_(_EPS).mul_(rate)
    return average


def divided(gradient: Tensor, values: Tensor, since: Tensor, average: Tensor, *, weight_decay: float) -> Tensor:
    """A gradient by 1 + |since| in average steps, a new tensor. since: how far the values have moved, changed here.

    weight_decay: the optimizer will add so much of the values to the gradient, of which the same share is to be left.
    """
    penalty = since.abs_().to(average.dtype).div_(average).add_(1)
    changed = gradient / penalty
    if weight_decay:
        share = values * penalty.reciprocal_().neg_().add_(1)
        changed.add_(share, alpha=-weight_decay)
    return changed.to(gradient.dtype)


@dataclass(frozen=True)
class GapAware(WrappingRule):
    """The job's optimizer, with each element of a gradient divided by 1 + its gap in average steps.

    The gap is |theta - what the worker was sent|. An average step is the largest rate so far times the root of a
    running mean of squared steps, each divided by its rate (under SGD that is the momentum, or the gradient without
    one). Weight decay that the optimizer adds to the gradient is divided too, decoupled one is not.
    """

    name: ClassVar[str] = "gap-aware"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORKER, Need.PULLS})
    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise JobError(f"decay of {self.name} is {self.decay}; it must be at least 0 and below 1")

    def check(self, spec: RuleSpec) -> None:
        if spec.name == "Rprop":
            raise JobError(
                f"update rule {self} divides gradients, but {spec.name} takes only their signs; use another optimizer, "
                "or another rule"
            )

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        super().check_tensors(spec, tensors)
        require_real(self, tensors)

    def own_states(self, dtype: torch.dtype, device: torch.device) -> Mapping[str, StateSpec]:
        """See WrappingRule: what was sent to each worker; the mean, how many steps are in it, and the largest rate."""
        number = StateSpec(dtype=torch.float64, device=device, scalar=True)
        return {
            **sent_states(dtype, device),
            "mean_square_step": StateSpec(dtype=torch.promote_types(dtype, torch.float32), device=device),
            "steps": number,
            "largest_rate": number,
        }

    def make(self, site: Site) -> GapAwareBucket:
        return GapAwareBucket(self, site)


class GapAwareBucket(WrappingBucketRule):
    def __init__(self, rule: GapAware, site: Site) -> None:
        super().__init__(rule, site)
        self._decay = rule.decay
        self._decoupled = is_decoupled(site.spec.name, site.group)

    def carry_out(self, update: Update) -> None:
        """See BucketRule. Also takes the optimizer's step into the mean."""
        before = update.values.clone() if update.source is None else update.source
        super().carry_out(update)
        rate = update.arguments["lr"]
        if not rate:
            return  # nothing has moved, and the step by rate is unknown
        with torch.no_grad():
            for run in self.runs_of(update, update.values):
                mean = run.state("mean_square_step")
                step = (before[run.span] - run.values).to(mean.dtype).div_(rate)
                mean.mul_(self._decay).addcmul_(step, step, value=1 - self._decay)
                run.set_number("steps", run.number("steps") + 1)
                run.set_number("largest_rate", max(run.number("largest_rate"), rate))

    def changed(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> Tensor:
        steps, since = run.number("steps"), moved(run)
        if since is None or not steps:
            return run.gradient
        rate = max(run.number("largest_rate"), arguments["lr"])
        average = average_step(run.state("mean_square_step"), steps, self._decay, rate)
        decay = 0.0 if self._decoupled else arguments.get("weight_decay", 0.0)
        # The optimizer adds decay * theta after it has turned the gradient round for maximize.
        decay = -decay if decay and arguments["maximize"] else decay
        return divided(run.gradient, run.values, since, average, weight_decay=decay)
