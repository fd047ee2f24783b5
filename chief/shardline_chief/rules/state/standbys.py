"""Which server holds which standby, and promotion without a rollback when a server is lost. Pure.

PROTOCOL 1.6, 1.8. Only the chief changes who replicates. A standby that its primary reported as synced is promoted when
the primary dies; if it turns out to be incomplete it refuses, and the job rolls back to a checkpoint.

Each choice of a standby for a shard is an appointment with its own number. It is recorded in the journal before any
server gets the order, and a standby knows the appointment it was copied for. A primary continues without its standby
only once the journal names another appointment, or none. So a standby whose number is in the journal has everything
that the primary ever acknowledged; any other is out of date, whoever died between the entry and the order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardline.core.placement import Placement
from shardline.core.status import PsStatus, ShardStatus
from shardline_chief.rules.actions import Promotion

WHOLE = ("synced", "silent")
"""States in which a standby has everything that its primary ever acknowledged."""


def protected(
    placement: tuple[Placement, ...],
    living: Mapping[str, str],
    *,
    appoint: Callable[[], int] = lambda: 0,
    avoid: Callable[[int, str], bool] = lambda shard, task: False,
    moves: Mapping[int, str] = MappingProxyType({}),
    each: bool = True,
) -> tuple[Placement, ...]:
    """The same placement, each shard with a standby on the next server after its primary, if there is another server.

    living: address of each server, by task. avoid(shard, task): whether a server is not to hold a shard's standby for
    now. moves: where the standby of a shard has to be, since it moves there. each: False: only those shards have one.
    appoint: returns a new appointment number. A standby on a living server stays as it is.
    """
    order = sorted(living, key=_index)
    result = []
    for place in placement:
        task, appointment, aim = place.standby_task, place.appointment, moves.get(place.shard, "")
        if aim in living and aim != place.task:
            if task != aim:
                task, appointment = aim, appoint()
        elif not each:
            task, appointment = "", 0
        elif task not in living or task == place.task:
            first = next((n for n, name in enumerate(order) if _index(name) > _index(place.task)), 0)
            after = [*order[first:], *order[:first]]
            task = next((name for name in after if name != place.task and not avoid(place.shard, name)), "")
            appointment = appoint() if task else 0
        result.append(replace(place, standby_task=task, standby_address=living.get(task, ""), appointment=appointment))
    return tuple(result)


def _index(task: str) -> int:
    return int(task.partition("/")[2])


def spread(
    placement: tuple[Placement, ...], sizes: Mapping[int, int], holders: Collection[str], *, even: bool
) -> dict[int, str]:
    """Moves of shards, by shard, to the server that gets it: each away from a server that is not to hold any.

    A shard goes to the server that has its standby, if there is one, or else to the one with least.

    sizes: bytes by shard. even: also from the server with most bytes to the one with least, as long as that makes the
    largest smaller by a tenth of what moves.
    """
    home = {place.shard: place.task for place in placement}
    load = {task: sum(sizes[shard] for shard, at in home.items() if at == task) for task in sorted(holders, key=_index)}
    copies = {place.shard: place.standby_task for place in placement}
    moves: dict[int, str] = {}

    def move(shard: int, task: str) -> None:
        if home[shard] in load:
            load[home[shard]] -= sizes[shard]
        load[task] += sizes[shard]
        home[shard] = moves[shard] = task

    for shard in sorted(home, key=lambda shard: -sizes[shard]):
        if home[shard] not in load:
            copy = copies[shard]
            move(shard, copy if copy in load else min(load, key=lambda task: load[task]))
    while even:
        most, least = max(load, key=lambda task: load[task]), min(load, key=lambda task: load[task])
        gain = load[most] - load[least]
        fitting = [shard for shard, at in home.items() if at == most and 1.1 * sizes[shard] < gain]
        if not fitting:
            break
        move(max(fitting, key=lambda shard: sizes[shard]), least)
    return {place.shard: moves[place.shard] for place in placement if moves.get(place.shard, place.task) != place.task}


def without_standbys(placement: tuple[Placement, ...], shards: Collection[int]) -> tuple[Placement, ...]:
    """The same placement, with the standbys of these shards removed."""
    return tuple(_alone(place) if place.shard in shards else place for place in placement)


def _alone(place: Placement) -> Placement:
    return replace(place, standby_task="", standby_address="", appointment=0)


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """How to survive a loss without a rollback."""

    placement: tuple[Placement, ...]
    """The new placement, without standbys that are gone."""
    promoted: Mapping[int, Promotion]
    """The standby to promote, by shard."""


def after_loss(placement: tuple[Placement, ...], living: Mapping[str, str], whole: Collection[int]) -> StandIn | None:
    """How the job continues with the remaining servers; None if some shard has lost every holder.

    living: address by task. whole: shards whose standby has everything.
    """
    held = {task: {place.shard for place in placement} for task in living}
    copies = {(place.standby_task, place.shard, place.appointment) for place in placement if place.shard in whole}
    return _stand_in(placement, {}, living, held, copies)


def as_found(
    placement: tuple[Placement, ...],
    promoted: Mapping[int, Promotion],
    servers: Mapping[str, PsStatus],
    *,
    since: int,
    living: Mapping[str, str],
) -> StandIn | None:
    """How a restarted chief continues, given what the servers report; None if some shard has no holder.

    promoted: standbys that the last chief was promoting. servers: status of those still the same process. since: oldest
    timeline with the current values. living: address by task. A standby's own report that it is synced suffices if it
    was copied for the appointment in the journal, since its primary answered nobody without it.
    """
    there = {task: status for task, status in servers.items() if status.timeline >= since}
    held = {task: {one.shard for one in status.shards if one.initialized} for task, status in there.items()}
    copies = {(task, one.shard, one.appointment) for task in there for one in there[task].standbys if one.synced}
    return _stand_in(placement, promoted, {task: living.get(task, "") for task in there}, held, copies)


def _stand_in(
    placement: tuple[Placement, ...],
    promoted: Mapping[int, Promotion],
    there: Mapping[str, str],
    held: Mapping[str, Collection[int]],
    copies: Collection[tuple[str, int, int]],
) -> StandIn | None:
    """For every shard its primary; where that is gone, or its standby is being promoted, the standby; None if neither.

    there: address by task. held: shards whose values it has, by task. copies: whole standbys.
    """
    result: list[Placement] = []
    turned: dict[int, Promotion] = {}
    for place in placement:
        shard = place.shard
        heir = promoted.get(shard, Promotion(place.standby_task, place.appointment))
        if shard not in promoted and shard in held.get(place.task, ()):
            result.append(place if place.standby_task in there else _alone(place))
        elif heir.task in there and (
            (heir.task, shard, heir.appointment) in copies or (shard in promoted and shard in held[heir.task])
        ):
            turned[shard] = heir
            result.append(Placement(shard=shard, task=heir.task, address=there[heir.task]))
        else:
            return None
    return StandIn(placement=tuple(result), promoted=turned)


@dataclass(frozen=True)
class StandbyChange:
    """A change of a shard's standby worth logging."""

    sentence: str
    protected: bool = False
    """Whether the standby is synced."""


class Protection:
    """State of the standbys, as last reported by their primaries."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self._homes: dict[int, str] = {}
        """Server to which a primary sends its records, by shard."""
        self._silent_since_s: dict[int, float] = {}
        self._avoided: dict[tuple[int, str], float] = {}
        """Until when a server is not to hold a shard's standby, by (shard, task)."""

    def observe(
        self, placement: Iterable[Placement], shards: Iterable[ShardStatus], now_s: float
    ) -> list[StandbyChange]:
        """Take in one ps's report on its shards; returns the changes worth logging."""
        wanted = {place.shard: place.standby_task for place in placement}
        said = []
        for shard in shards:
            task = wanted.get(shard.shard, "")
            state = shard.standby if task and shard.standby_task == task else ""
            before = self.states.get(shard.shard, "")
            self.states[shard.shard] = state
            self._homes[shard.shard] = task if state else ""
            if state == "silent":
                self._silent_since_s.setdefault(shard.shard, now_s)
            else:
                self._silent_since_s.pop(shard.shard, None)
            if state != before and (change := _change(shard, task, state, before)):
                said.append(change)
        return said

    def whole(self) -> set[int]:
        """Shards whose standby may be promoted."""
        return {shard for shard, state in self.states.items() if state in WHOLE}

    def followed(self, placement: Iterable[Placement]) -> frozenset[int]:
        """Shards whose standby is being followed at its place in this placement; other copies there are out of date."""
        return frozenset(p.shard for p in placement if p.standby_task and self._homes.get(p.shard) == p.standby_task)

    def too_silent(self, now_s: float, limit_s: float) -> list[int]:
        """Shards whose primary has been blocked by a silent standby for at least limit_s."""
        return sorted(shard for shard, since_s in self._silent_since_s.items() if now_s - since_s >= limit_s)

    def forget(self, shards: Iterable[int]) -> None:
        """These shards have no standby any more."""
        for shard in list(shards):
            self.states.pop(shard, None)
            self._homes.pop(shard, None)
            self._silent_since_s.pop(shard, None)

    def avoid(self, shard: int, task: str, until_s: float) -> None:
        """Don't place a shard's standby on this server until until_s."""
        self._avoided[shard, task] = until_s

    def avoided(self, shard: int, task: str, now_s: float) -> bool:
        """Whether a shard's standby is not to be placed on this server now."""
        return now_s < self._avoided.get((shard, task), now_s)


def _change(shard: ShardStatus, task: str, state: str, before: str) -> StandbyChange | None:
    if state == "synced":
        return StandbyChange(f"shard {shard.shard} is protected: its standby on {task} is complete", protected=True)
    problem = f"({shard.standby_problem})"
    if state == "silent":
        return StandbyChange(f"shard {shard.shard} is blocked: its standby on {task} does not answer {problem}")
    if state in ("unprotected", "copying") and before in WHOLE:
        return StandbyChange(
            f"shard {shard.shard} is unprotected: its standby on {task} is being copied again {problem}"
        )
    return None
