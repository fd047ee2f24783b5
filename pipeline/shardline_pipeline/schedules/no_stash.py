"""What weight stashing is for: a backward pass that finds newer parameters than its forward pass had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline_pipeline.schedules.asynchronous import OneVersion


@dataclass(frozen=True)
class NoStash(OneVersion):
    """A negative example only: backward passes use newer parameters than their forward passes, so no gradient is right.

    Narayanan et al.: PipeDream (2019), section 3.3, has it to show what stashing is for. Each stage computes forward
    with its newest parameters, as in Stash; those that arrive meanwhile overwrite what autograd has kept of them.
    """

    name: ClassVar[str] = "no-stash"
    warning: ClassVar[str] = (
        "pipeline no-stash is a negative example: its backward passes use other parameters than their forward passes, "
        "so what it trains with is the gradient of nothing; choose pipeline='stash' or 'ftpipe' to train"
    )
