"""Which workers make a team that shares layers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardline.consistency.assignment import NOWHERE, assign


def assign_teams(
    previous: Mapping[int, str],
    hosts: Mapping[str, str],
    cells: int,
    ranks: int,
    homes: Mapping[int, str] = NOWHERE,
) -> dict[int, str]:
    """Worker by unit, where `ranks` workers of one host share each of the cells [0, cells); {} if no host has as many.

    Unit `rank * cells + cell` is a rank's part of a cell. Each worker has one rank, in all the cells of its team.
    previous: the assignment so far. A team keeps its living members of one host, where most are; others take the places
    of those that it lacks, or it is dissolved. hosts: of the living workers, in order of index. homes: see assign().
    """
    if ranks == 1:
        return assign(previous, list(hosts), cells, homes)
    before: dict[tuple[str, ...], list[int]] = {}
    for cell in range(cells):
        before.setdefault(tuple(previous.get(rank * cells + cell, "") for rank in range(ranks)), []).append(cell)
    remains = [(_left(team, hosts), own) for team, own in before.items()]
    # The most complete first.
    remains.sort(key=lambda item: item[0].count(""))
    placed = {member for team, _ in remains for member in team}
    free = [worker for worker in hosts if worker not in placed]
    teams: list[list[str]] = []
    cells_of: dict[str, list[int]] = {}
    while remains:
        team, own = remains[0]
        here = {hosts[member] for member in team if member}
        spare = [worker for worker in free if hosts[worker] in here]
        if len(spare) < team.count("") or not here:
            # The least complete one, in the end this one itself.
            free += filter(None, remains.pop()[0])
            continue
        for worker in spare[: team.count("")]:
            team[team.index("")] = worker
            free.remove(worker)
        teams.append(team)
        cells_of[team[0]] = own
        remains.pop(0)
    teams += _new_teams(sorted(free, key=list(hosts).index), hosts, ranks)
    leaders = {team[0]: team for team in teams[:cells]}
    held = {cell: leader for leader, own in cells_of.items() for cell in own}
    found = assign(held, sorted(leaders, key=list(hosts).index), cells)
    return {
        rank * cells + cell: worker for cell, leader in found.items() for rank, worker in enumerate(leaders[leader])
    }


def _left(team: Sequence[str], hosts: Mapping[str, str]) -> list[str]:
    """The members that go on together, each in its place: a worker may have come back on another host."""
    where = [hosts[member] for member in team if member in hosts]
    home = max(where, key=where.count, default="")
    return [member if member in hosts and hosts[member] == home else "" for member in team]


def _new_teams(free: Sequence[str], hosts: Mapping[str, str], ranks: int) -> list[list[str]]:
    teams = []
    for host in dict.fromkeys(hosts.values()):
        there = [worker for worker in free if hosts[worker] == host]
        teams += [there[first : first + ranks] for first in range(0, len(there) - ranks + 1, ranks)]
    return teams
