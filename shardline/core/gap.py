"""How much less a gradient counts the further the parameters have moved since. Pure.

Barkai et al.: Gap-Aware Mitigation of Gradient Staleness (2019).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardline.core.spec import Argument

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
