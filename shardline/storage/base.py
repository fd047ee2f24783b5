"""The parts of a shard as seen by the code that serves it: blocks of parameters with a step and a version."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from shardline.core.plan import BucketSpec
from shardline.storage.writes import WriteCounts


class ParameterBlock(Protocol):
    """Parameters that are pushed, updated and pulled as one, such as a dense bucket.

    To read values that must not change meanwhile, hold `lock`. To send published values in place, no lock is needed;
    check afterwards, with what `writes.intact(step)` returned before.
    """

    lock: threading.Lock
    number: int
    """Number within the shard, from 0."""
    spec: BucketSpec
    names: tuple[str, ...]
    """Names of the tensors, one per slice of the spec."""
    step: int
    """Step of the current values. Written last, so everything that it says is published is complete."""
    version: int
    """Number of updates."""
    changed_step: int
    """Lowest step since which the values are unchanged: a client with this or a later step needs no bytes."""
    overwritten: int
    """Highest step whose values may have been overwritten."""
    writes: WriteCounts
    """Counts each step's values as they begin to be replaced, after `overwritten` says so."""
    initialized: bool

    def values_at(self, step: int) -> torch.Tensor:
        """Flat values of a step that is still available, in the spec's dtype, on the shard's device."""
        ...

    def bytes_at(self, step: int) -> memoryview:
        """The bytes of values_at(), not copied; of a shard in host memory."""
        ...

    def answer(self, step: int, task: str) -> torch.Tensor:
        """Values for a pull of that step by `task` ("" = a task that does not train); copy them under `lock`."""
        ...
