"""Which worker runs which replicas. Pure.

The assignment does not affect the result by a single bit, since replicas belong to the job. It is chosen for balance,
for blocks that can be summed before they are sent (contiguous, aligned), and to move little when workers come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOWHERE: Mapping[int, str] = {}


def assign(
    previous: Mapping[int, str], living: Sequence[str], replicas: int, homes: Mapping[int, str] = NOWHERE
) -> dict[int, str]:
    """Worker by replica, for every replica in [0, replicas); {} if no worker is living.

    previous: the assignment so far. A living worker keeps its replicas as long as the counts differ by at most one.
    living: workers in order of index. If there are more than `replicas`, the rest are spares: workers without replicas
    first, the highest index first. homes: the first worker of each replica; those move there before others do.
    """
    if not living:
        return {}
    holders = set(previous.values())
    active = sorted(living, key=lambda w: (w not in holders, living.index(w)))[:replicas]
    active.sort(key=living.index)
    held: dict[str, list[int]] = {worker: [] for worker in active}
    for replica, worker in sorted(previous.items()):
        if worker in held and replica < replicas:
            held[worker].append(replica)
    if not any(held.values()):
        return _blocks(active, replicas)

    def load(worker: str) -> tuple[int, int]:
        return len(held[worker]), active.index(worker)

    placed = {replica for mine in held.values() for replica in mine}
    for replica in range(replicas):
        if replica not in placed:
            held[min(active, key=load)].append(replica)
    while True:
        least = min(active, key=load)
        homing = {worker for worker in active if any(homes.get(replica) == least for replica in held[worker])}
        most = max(active, key=lambda w: (len(held[w]), w in homing, -active.index(w)))
        if len(held[most]) - len(held[least]) <= 1:
            break
        # From the end, so that both what stays and what moves are contiguous.
        moves = max(held[most], key=lambda replica: (homes.get(replica) == least, replica))
        held[most].remove(moves)
        held[least] = sorted([*held[least], moves])
    return {replica: worker for worker in active for replica in held[worker]}


def _blocks(workers: Sequence[str], replicas: int) -> dict[int, str]:
    """Contiguous runs of lengths as equal as possible; aligned if the counts are powers of two."""
    base, extra = divmod(replicas, len(workers))
    result, first = {}, 0
    for number, worker in enumerate(workers):
        count = base + (number < extra)
        result.update(dict.fromkeys(range(first, first + count), worker))
        first += count
    return result


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
    """As many teams of workers of one host as these make."""
    teams = []
    for host in dict.fromkeys(hosts.values()):
        there = [worker for worker in free if hosts[worker] == host]
        teams += [there[first : first + ranks] for first in range(0, len(there) - ranks + 1, ranks)]
    return teams


def replicas_of(assignment: Mapping[int, str], worker: str) -> tuple[int, ...]:
    """The worker's replicas, ascending."""
    return tuple(sorted(replica for replica, holder in assignment.items() if holder == worker))


def by_worker(assignment: Mapping[int, str]) -> dict[str, list[int]]:
    """The replicas of each worker that has some, ascending."""
    found: dict[str, list[int]] = {}
    for replica in sorted(assignment):
        found.setdefault(assignment[replica], []).append(replica)
    return found
