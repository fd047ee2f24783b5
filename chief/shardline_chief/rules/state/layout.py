"""Which server holds what, in which history of the parameters."""

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
        """The servers hold a table of members, so whoever joins must be put into it before the reply (F4)."""
        self.placing_standbys = False
        """Standbys are being placed while training goes on."""
        self._term = term
        self._timelines = self._appointments = 0

    def new_timeline(self) -> int:
        """Begin another history."""
        self._timelines += 1
        self.timeline = self._term << 32 | self._timelines
        return self.timeline

    def new_appointment(self) -> int:
        """A number for a standby that a shard is given, which no standby of any chief has had before."""
        self._appointments += 1
        return self._term << 32 | self._appointments

    @property
    def filled(self) -> int:
        """Shards that hold anything; 0 while there is no plan."""
        return filled_shards(self.plan) if self.plan is not None else 0


def filled_shards(plan: Plan) -> int:
    """Shards that hold anything: a small model on many servers leaves some empty."""
    return sum(bool(shard.buckets) for shard in plan.shards)


def addresses(placement: tuple[Placement, ...]) -> dict[str, str]:
    """Where the servers of a placement answer, those that only hold standbys too."""
    standbys = {place.standby_task: place.standby_address for place in placement if place.standby_task}
    return {**standbys, **{place.task: place.address for place in placement}}
