"""Which server holds what, in which timeline of the parameters."""

from __future__ import annotations

from shardline.core.placement import Placement
from shardline.core.plan import Plan


class JobLayout:
    """Plan, placement and timeline."""

    def __init__(self, term: int) -> None:
        self.plan: Plan | None = None
        self.placement: tuple[Placement, ...] = ()
        self.timeline = 0
        self.table_sent = False
        """The servers hold a table of members, so a task that joins must be added to it before the reply (F4)."""
        self.placing_standbys = False
        """Standbys are being placed while training continues."""
        self._term = term
        self._timelines = self._appointments = 0

    def new_timeline(self) -> int:
        """Begin another timeline; returns its number, unique over all chiefs."""
        self._timelines += 1
        self.timeline = self._term << 32 | self._timelines
        return self.timeline

    def new_appointment(self) -> int:
        """A number for a new appointment of a standby, unique over all chiefs."""
        self._appointments += 1
        return self._term << 32 | self._appointments

    @property
    def filled(self) -> int:
        """Number of shards that have buckets, as not all have in a small model on many servers; 0 without a plan."""
        return sum(bool(shard.buckets) for shard in self.plan.shards) if self.plan is not None else 0


def addresses(placement: tuple[Placement, ...]) -> dict[str, str]:
    """Addresses of the servers of a placement, by task, including those that only hold standbys."""
    standbys = {place.standby_task: place.standby_address for place in placement if place.standby_task}
    return {**standbys, **{place.task: place.address for place in placement}}
