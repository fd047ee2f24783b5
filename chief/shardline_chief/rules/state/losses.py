"""Losses of servers: the one being handled, and earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardline.core.image import WorkerSequence
from shardline.core.orders import ACKNOWLEDGED, LOST, SINCE
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
    """Steps to be computed again. If shards go back one by one: updates of the lost shards, as far as their servers
    had reported; see Losses.updates()."""


@dataclass(frozen=True, kw_only=True)
class WentBack:
    """Shards that went back to a checkpoint, each by itself."""

    timeline: int
    """The first in which they have the checkpoint's values."""
    sequences: Mapping[int, Mapping[str, WorkerSequence]]
    """By shard: each worker's last push that the checkpoint has."""

    def kept(self, task: str, incarnation: int, shard: int, number: int) -> int:
        """How many of a life's first `number` pushes a shard still has."""
        if shard not in self.sequences:
            return number
        known = self.sequences[shard].get(task)
        if known is None or known.incarnation < incarnation:
            return 0
        # A push of a later life comes after all of this one.
        return number if known.incarnation > incarnation else min(number, known.last_seq)


@dataclass(kw_only=True)
class Loss:
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
    now: Loss | None = None
    recoveries: list[Recovered] = field(default_factory=list)
    attempts: int = 0
    """Losses in a row with no step made between them."""
    resumed_at: int | None = None
    """Step that all shards had reached when the job resumed; None until they report."""
    failovers: int = 0
    """How many chiefs of this job have taken over from another."""
    back: list[WentBack] = field(default_factory=list)
    """Where shards go back one by one: each time."""

    def updates(self, lives: Mapping[tuple[str, int], Mapping[str, float]]) -> int:
        """Acknowledged updates that are gone, as far as anybody knows.

        lives: the last figures of each life of a worker, by (task, incarnation). A life that compared its numbers with
        the shards after they had gone back has counted its own lost updates. Of one that did not come to it, because it
        died, its last report says which of its pushes were acknowledged. Whatever was acknowledged after that report is
        not known, unless the shard's server had told.
        """
        told = sum(self._of(task, incarnation, figures) for (task, incarnation), figures in lives.items())
        return max(told, sum(recovered.lost for recovered in self.recoveries) if self.back else 0)

    def _of(self, task: str, incarnation: int, figures: Mapping[str, float]) -> int:
        lost, since = int(figures.get(LOST, 0.0)), figures.get(SINCE, 0.0)
        later = [one for one in self.back if one.timeline > since > 0]
        for shard in {shard for one in later for shard in one.sequences}:
            before = number = int(figures.get(f"{ACKNOWLEDGED}{shard}", 0.0))
            for one in later:
                number = one.kept(task, incarnation, shard, number)
            lost += before - number
        return lost
