"""Links between groups of workers: what a step of a plan carries over them. Pure."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from shardline_pipeline.partition.costs import Costs, LinkLevel, Stages

Item = tuple[float, float, float]
"""(head start, bytes, time of the last ones) of an exchange."""


@dataclass(frozen=True)
class Travel:
    """Layers whose parameters travel together."""

    head_s: float
    first: int
    end: int
    workers: tuple[int, ...]


def levels(costs: Costs) -> Sequence[tuple[int, LinkLevel]]:
    """Workers of a group, and the level of the groups' links."""
    sizes = itertools.accumulate((level.count for level in costs.cluster.levels), operator.mul)
    return list(zip(sizes, costs.cluster.levels[1:], strict=False))


def links_s(costs: Costs, plan: Stages) -> float:
    """Time of the longest of these links in a step without a flush, by all that workers exchange over it."""
    longest = 0.0
    for size, level in levels(costs):
        exchanges = exchanged(costs, [Travel(0.0, stage.first, stage.end, stage.workers) for stage in plan], size)
        handed = parcels(costs, plan, size)
        for group in {*exchanges, *handed}:
            nbytes = sum(size for _, size, _ in exchanges.get(group, ())) + max(handed.get(group, (0.0,)))
            longest = max(longest, nbytes / level.bytes_per_s)
    return longest


def parcels_s(costs: Costs, plan: Stages, size: int, level: LinkLevel) -> float:
    """Time of the longest link of a level for the parcels of a step."""
    return max(map(max, parcels(costs, plan, size).values()), default=0.0) / level.bytes_per_s


def exchanged(costs: Costs, parts: Sequence[Travel], size: int) -> dict[int, list[Item]]:
    """By group of so many workers: what parameters its link carries."""
    found: dict[int, list[Item]] = {}
    for part in parts:
        homes = [worker // size for worker in part.workers]
        for home in homes:
            nbytes = costs.load(part.first, part.end)
            if costs.ring:
                nbytes = costs.ring_bytes(part.first, part.end, len(set(homes))) / homes.count(home)
            found.setdefault(home, []).append((part.head_s, nbytes, costs.last_s(part.first, part.end)))
    return found


def parcels(costs: Costs, plan: Stages, size: int) -> dict[int, list[float]]:
    """By group of so many workers: bytes (out, in) of a step's activations and gradients."""
    found: dict[int, list[float]] = {}

    def add(where: int, out: float, into: float) -> None:
        both = found.setdefault(where, [0.0, 0.0])
        both[0] += out
        both[1] += into

    for one, other in itertools.pairwise(plan):
        output, gradient = costs.handed[one.end - 1]
        homes, others = ([worker // size for worker in stage.workers] for stage in (one, other))
        # Which groups hand how many microbatches to each other: microbatch m is computed by worker m mod r.
        cycle = math.lcm(len(homes), len(others))
        for left, right, share in [
            (homes[m % len(homes)], others[m % len(others)], costs.microbatches / cycle) for m in range(cycle)
        ]:
            if left != right:
                add(left, share * output, share * gradient)
                add(right, share * gradient, share * output)
    return found
