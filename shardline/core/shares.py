"""Sizes of shards by the bandwidth that each machine has left for its servers. Pure.

A machine with w of N workers, whose servers hold the share s of the model, moves w (1 - s) of it for its own workers
and (N - w) s for those of others, each way and in every step. The shares here make the busiest link least busy, if all
links are equal. With one worker on each of n machines and k spare machines that is the closed form of BytePS
(Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training", OSDI 2020, section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

ROUNDS = 60
"""Halvings of the interval in which the least load is searched."""
LEAST = 1e-3
"""A smaller part of the largest share is none."""
EVEN = 0.01
"""Shares that differ by less are equal."""


def loads(servers: Sequence[str], workers: Sequence[str], shares: Sequence[float]) -> dict[str, float]:
    """Models that each machine's link moves each way in a step. servers, workers: their machines."""
    held: Counter[str] = Counter()
    for machine, share in zip(servers, shares, strict=True):
        held[machine] += share  # type: ignore[assignment]  # a Counter of floats
    there = Counter(workers)
    return {
        machine: there[machine] + (len(workers) - 2 * there[machine]) * held[machine]
        for machine in {*servers, *workers}
    }


def shares_of(servers: Sequence[str], workers: Sequence[str]) -> tuple[float, ...]:
    """The share of the model that each server holds; they add up to 1. 0: its link is needed for others.

    servers, workers: the machine of each, by index.
    """
    there = Counter(workers)
    machines = Counter(servers)
    low, high = 0.0, float(2 * len(workers) + 1)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if _bounds(machines, there, len(workers), middle) else (middle, high)
    bounds = _bounds(machines, there, len(workers), high)
    assert bounds is not None  # as it is for the first `high`
    missing = 1.0 - sum(least for least, _ in bounds.values())
    slack = sum(most - least for least, most in bounds.values()) or 1.0
    held = {machine: least + missing * (most - least) / slack for machine, (least, most) in bounds.items()}
    found = [held[machine] / machines[machine] for machine in servers]
    kept = [share if share >= LEAST * max(found) else 0.0 for share in found]
    return tuple(share / sum(kept) for share in kept)


def uneven_shares(servers: Sequence[str], workers: Sequence[str]) -> tuple[float, ...]:
    """shares_of(), empty if they are equal or there are no workers: then a plan needs none."""
    found = shares_of(servers, workers) if workers else ()
    return found if found and max(found) - min(found) >= EVEN else ()


def _bounds(
    machines: Mapping[str, int], workers: Mapping[str, int], total: int, load: float
) -> dict[str, tuple[float, float]] | None:
    """Least and largest share of each machine with servers, if no link is to move more; None if that can't be."""
    if any(count > load for machine, count in workers.items() if machine not in machines):
        return None
    found = {}
    for machine in machines:
        own = workers.get(machine, 0)
        others = total - 2 * own
        # own + others * share <= load
        least, most = 0.0, 1.0
        if others > 0:
            most = min(1.0, (load - own) / others)
        elif others < 0:
            least = max(0.0, (load - own) / others)
        elif own > load:
            return None
        if least > 1.0 or most < 0.0:
            return None
        found[machine] = (least, most)
    fits = sum(least for least, _ in found.values()) <= 1.0 <= sum(most for _, most in found.values())
    return found if fits else None
