"""Which worker runs which logical replicas. Pure.

The replicas belong to the job, so this choice moves no bit of the result: it is about balance, about blocks that can be
summed before they are sent (contiguous, aligned), and about moving little when workers come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def assign(previous: Mapping[int, str], living: Sequence[str], replicas: int) -> dict[int, str]:
    """Replica -> worker for every replica in [0, replicas); {} where nobody lives.

    previous: the assignment so far. A living worker keeps its replicas as long as the counts differ by at most one.
    living: workers by index. Beyond `replicas` of them the rest are spares: those that hold none so far, highest first.
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
        most, least = max(active, key=lambda w: (len(held[w]), -active.index(w))), min(active, key=load)
        if len(held[most]) - len(held[least]) <= 1:
            break
        # From the end, so that what stays and what moves are both contiguous.
        held[least].append(held[most].pop())
        held[least].sort()
    return {replica: worker for worker in active for replica in held[worker]}


def _blocks(workers: Sequence[str], replicas: int) -> dict[int, str]:
    """Contiguous runs of as equal length as can be; aligned where the counts are powers of two."""
    base, extra = divmod(replicas, len(workers))
    result, first = {}, 0
    for number, worker in enumerate(workers):
        count = base + (number < extra)
        result.update(dict.fromkeys(range(first, first + count), worker))
        first += count
    return result


def replicas_of(assignment: Mapping[int, str], worker: str) -> tuple[int, ...]:
    """The worker's replicas in order."""
    return tuple(sorted(replica for replica, holder in assignment.items() if holder == worker))
