"""Tensors of two trainings, compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardline.core.tensor_bytes import same_bits

Values = Mapping[str, torch.Tensor]
"""Tensors by name, on the CPU."""


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two trainings."""

    name: str
    step: int
    """Steps done when it first differed; 0 = before the first step."""
    after: int
    """Steps done when the numbers below were taken."""
    largest: float
    """Largest absolute difference; infinite if one of the two has no such tensor, or one of another shape or dtype."""
    elements: int
    """Number of elements that differ."""
    of: int
    """Number of elements."""
    what: str = ""
    """Difference in shape or dtype, or a tensor that only one side has; "" if only values differ."""

    def __str__(self) -> str:
        first = f"from step {self.step} on" if self.step else "before the first step"
        if self.what:
            return f"{self.name}: {first}, {self.what}"
        return (
            f"{self.name}: {first}; after step {self.after} by at most {self.largest:.3g}, in {self.elements} of "
            f"{self.of} elements"
        )


def differences(expected: Mapping[int, Values], found: Mapping[int, Values]) -> list[Difference]:
    """The tensors that differ, the first and largest difference first.

    Both: values by number of steps done, 0 = before the first step. Compared are the steps of `found`, in order.
    """
    steps = sorted(found)
    last = steps[-1]
    first = {
        name: next((step for step in steps if _differ(expected[step], found[step], name)), None)
        for name in {**expected[last], **found[last]}
    }
    listed = [_measured(name, step, last, expected, found) for name, step in first.items() if step is not None]
    return sorted(listed, key=lambda one: (one.step, -one.largest, one.name))


def _differ(expected: Values, found: Values, name: str) -> bool:
    a, b = expected.get(name), found.get(name)
    if a is None or b is None:
        return a is not b
    return a.shape != b.shape or a.dtype != b.dtype or not same_bits(a, b)


def _measured(
    name: str, step: int, last: int, expected: Mapping[int, Values], found: Mapping[int, Values]
) -> Difference:
    after = last if _differ(expected[last], found[last], name) else step
    a, b = expected[after].get(name), found[after].get(name)
    if a is None or b is None:
        where = "only the servers have it" if a is None else "the servers don't have it"
        return Difference(name, step, after, math.inf, 0, 0, where)
    if a.shape != b.shape or a.dtype != b.dtype:
        what = f"{tuple(b.shape)} {b.dtype} on the servers, {tuple(a.shape)} {a.dtype} in plain PyTorch"
        return Difference(name, step, after, math.inf, 0, 0, what)
    wide = torch.complex128 if a.is_complex() else torch.float64
    gaps = (a.to(wide) - b.to(wide)).abs()
    # A NaN on one side alone is a difference without a size.
    largest = math.inf if bool(gaps.isnan().any()) else float(gaps.max())
    return Difference(name, step, after, largest, int((a != b).sum()), a.numel())
