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
        # Contiguous runs of lengths as equal as possible; aligned if the counts are powers of two.
        # Longer ones are spread evenly, so that neighbours, such as those of a host, have as many as others: 8
        # replicas of 6 workers are 4 of the first 3.
        ends = [number * replicas // len(active) for number in range(len(active) + 1)]
        runs = zip(active, ends, ends[1:], strict=False)
        return {replica: worker for worker, first, end in runs for replica in range(first, end)}

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


def replicas_of(assignment: Mapping[int, str], worker: str) -> tuple[int, ...]:
    return tuple(sorted(replica for replica, holder in assignment.items() if holder == worker))


def by_worker(assignment: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for replica in sorted(assignment):
        found.setdefault(assignment[replica], []).append(replica)
    return found
