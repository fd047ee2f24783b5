"""Losses of servers: the one that is being dealt with, and those before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardline.core.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The job went on after a parameter server was lost."""

    task: str
    """The first one that was lost."""
    at_step: int
    """How far all shards were, as last told."""
    from_step: int
    """Step of the checkpoint that was gone back to; 0 where there was none."""
    seconds: float
    """From its last sign of life until training went on."""
    lost: int
    """Steps to be computed again. Where each shard goes back alone: updates of the lost shards, as far as they had been
    told of; the workers know how many it really were (lost_updates in the summary)."""


@dataclass(kw_only=True)
class Loss:
    """A loss for which the job stands still."""

    first: str
    """The first task that was lost."""
    began_s: float
    """Its last sign of life."""
    at: dict[int, tuple[int, int]]
    """Step and version of each shard, as last told before the loss."""
    at_step: int
    home: tuple[Placement, ...]
    """Who held what before the loss."""
    failover: bool = False
    """Standbys take over, so nothing goes back."""


@dataclass
class Losses:
    """All losses of the run."""

    now: Loss | None = None
    recoveries: list[Recovered] = field(default_factory=list)
    attempts: int = 0
    """Losses in a row with no step made between them."""
    resumed_at: int | None = None
    """How far all shards were when the job went on; None until they have told."""
    failovers: int = 0
    """Chiefs of this job that took over from another."""
