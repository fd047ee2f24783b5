"""Losses of servers: the one being handled, and earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardline.core.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The job recovered from the loss of a parameter server."""

    task: str
    """The first task that was lost."""
    at_step: int
    """Step that all shards had reached, as last reported."""
    from_step: int
    """Step of the checkpoint that was rolled back to; 0 if there was none."""
    seconds: float
    """Seconds from its last sign of life until training resumed."""
    lost: int
    """Steps to be computed again. If shards go back one by one: updates of the lost shards, as far as reported; the
    workers know the exact number (lost_updates in the summary)."""


@dataclass(kw_only=True)
class Loss:
    """A loss that has stopped the job."""

    first: str
    """The first task that was lost."""
    began_s: float
    """Its last sign of life."""
    at: dict[int, tuple[int, int]]
    """Step and version of each shard, as last reported before the loss."""
    at_step: int
    home: tuple[Placement, ...]
    """The placement before the loss."""
    planned: bool = False
    """Nothing is lost: the job goes back because the chief has changed it."""
    failover: bool = False
    """Standbys are promoted, so nothing is rolled back."""


@dataclass
class Losses:
    """All losses of the run."""

    now: Loss | None = None
    recoveries: list[Recovered] = field(default_factory=list)
    attempts: int = 0
    """Losses in a row with no step made between them."""
    resumed_at: int | None = None
    """Step that all shards had reached when the job resumed; None until they report."""
    failovers: int = 0
    """How many chiefs of this job have taken over from another."""
