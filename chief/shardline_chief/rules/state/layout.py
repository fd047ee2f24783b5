"""Which server holds what, in which timeline of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardline.core.placement import Placement
from shardline.core.plan import Plan
from shardline_chief.rules.actions import Promotion


@dataclass(kw_only=True)
class Confirmed:
    """What every server has said that it has, of what the layout wants; nothing yet where a history begins."""

    led: bool = False
    """They obey this chief."""
    promoted: bool = False
    placement: tuple[Placement, ...] | None = None
    """The placement that they were configured with in this timeline. An empty one: they hold their shards, but what
    they know of standbys is out of date."""
    table: bool = False
    """They have a table of members."""
    first_cut: bool = False
    """Where a worker sets the first values: all are set, and the cut of step 0 has been ordered."""
    filled: bool = False
    """All shards have their values."""
    active: bool = False
    stop: int = 0
    """They stop by themselves at this step; 0 = at none."""


class JobLayout:
    """Plan, placement and timeline: what the servers are to have, and what they have. See reconcile.py."""

    def __init__(self, term: int) -> None:
        self.plan: Plan | None = None
        self.placement: tuple[Placement, ...] = ()
        self.timeline = 0
        self.keep: frozenset[int] = frozenset()
        """Shards that keep their values in a timeline that follows another; a checkpoint or a worker fills the rest."""
        self.stays = False
        """All values are kept: nothing is rolled back."""
        self.promoted: Mapping[int, Promotion] = {}
        """Standbys that become primaries before the timeline begins, by shard."""
        self.followed: frozenset[int] = frozenset()
        """Shards whose standbys are kept."""
        self.stop = 0
        """Step at which the servers stop by themselves; 0 = at none."""
        self.former: Mapping[str, str] = {}
        """Servers from which shards move away, address by task: they are told, too, and drop them."""
        self.reachable: Mapping[str, str] = {}
        """Takeover: the servers to ask what they hold, address by task."""
        self.have = Confirmed()
        self.in_flight = 0
        """Number of the order that removes the first difference, until all have answered it; 0 = none."""
        self.changes = 0
        """How often it changed what the servers are to have: an earlier Lead may have gone to other ones."""
        self.waits = False
        """It failed on some of them: until something else is wanted, it is given again with the next tick only."""
        self.table_sent = False
        """The servers hold a table of members, so a task that joins must be added to it before the reply (F4)."""
        self._term = term
        self._timelines = self._appointments = 0

    def want(
        self,
        placement: tuple[Placement, ...],
        *,
        keep: frozenset[int] = frozenset(),
        stays: bool = False,
        promoted: Mapping[int, Promotion] | None = None,
        followed: frozenset[int] = frozenset(),
        former: Mapping[str, str] | None = None,
    ) -> None:
        """Set what the servers are to hold. All of them are led before anything else: some may be other processes."""
        self.keep, self.stays, self.former = keep, stays, former or {}
        self.promoted = promoted or {}
        self.have_standbys(placement, followed)

    def have_standbys(self, placement: tuple[Placement, ...], followed: frozenset[int]) -> None:
        """Set who holds standbys; all else stays as it is wanted. followed: shards whose standbys are kept."""
        self.placement, self.followed = placement, followed
        self.have.led, self.waits = False, False
        self.changes += 1

    def give_up(self) -> None:
        """The servers keep what they have: they lack nothing until something else is wanted."""
        self.have = replace(self.have, led=True, placement=self.placement, table=True, filled=True, active=True)

    def forget(self) -> None:
        """The servers have nothing, as far as is known."""
        self.have, self.in_flight, self.waits, self.table_sent = Confirmed(), 0, False, False

    @property
    def settled(self) -> bool:
        """Whether the servers have this placement, and act on it."""
        return self.have.placement == self.placement and self.have.active

    @property
    def all_shards(self) -> frozenset[int]:
        return frozenset(range(len(self.plan.shards) if self.plan is not None else 0))

    @property
    def upcoming(self) -> int:
        """Number of the next timeline, unique over all chiefs."""
        return self._term << 32 | self._timelines + 1

    def new_timeline(self) -> int:
        """Begin another timeline, in which no server has anything yet; returns its number."""
        self.timeline = self.upcoming
        self._timelines += 1
        self.forget()
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
