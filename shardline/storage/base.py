"""What a shard is made of, as those see it who serve it: blocks of parameters with a step and a version."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from shardline.core.plan import BucketSpec


class ParameterBlock(Protocol):
    """Parameters that are pushed, updated and pulled as one. A dense bucket is one.

    Whoever reads values that are not to change meanwhile holds `lock`. Whoever sends published values where they lie
    holds nothing and asks afterwards: they were whole while `overwritten` was below their step and `restored` the same.
    """

    lock: threading.Lock
    number: int
    """Within the shard, from 0."""
    spec: BucketSpec
    names: tuple[str, ...]
    """Of the tensors, one per slice of the spec."""
    step: int
    """Of the present values. Written last: what it says is published is whole."""
    version: int
    """Updates that made them."""
    changed_step: int
    """Lowest step from which on the values have been the present ones: a holder of a later one needs no bytes."""
    overwritten: int
    """Highest step whose values may be written over by now."""
    restored: int
    """How often all values were replaced."""
    initialized: bool

    def values_at(self, step: int) -> torch.Tensor:
        """Flat values of a step that is still there, in the spec's dtype, on the shard's device."""
        ...

    def answer(self, step: int, task: str) -> torch.Tensor:
        """What a pull of that step by `task` gets ("" = one that does not train); to be copied under `lock`."""
        ...
