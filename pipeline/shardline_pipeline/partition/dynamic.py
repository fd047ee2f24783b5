"""Stages of neighbouring layers for a cluster, by dynamic programming: the best there are. Pure.

Narayanan et al.: PipeDream (2019), section 3.1. A^k(i..j, m), the slowest worker of layers i..j on m components of
level k, is the best of: one stage that all m replicate; or a stage on r of them, and A^k of the other layers on m - r.
What a component does alone is A^(k-1); a component of level 0 is a worker. In addition to theirs: memory, which depends
on the workers of later stages, so the first stage is split off, not the last; and what a step takes besides its slowest
worker's time. So A is a set of plans, of which none is better than another in all that counts: flushed.measure() or
unbroken.measure(). With groups of workers it is (slowest worker or link, bytes for the servers), as if nothing had to
wait for anything else, and the plans in the set are compared by forecasts.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardline_pipeline.partition import flushed, unbroken
from shardline_pipeline.partition.costs import ALL_REDUCE, Costs, PlannedStage, Stages

MOST_POINTS, FEW_POINTS = {1: 20, 2: 20}, 12
"""Layers at which stages may begin, by number of levels: with more, neighbours that compute least are joined."""


@dataclass(frozen=True)
class _Found:
    """One way to run some layers."""

    measure: flushed.Measure
    """What a plan is compared by: the less of each the better. With groups, (seconds of the slowest worker or link in a
    step; bytes for the servers, of all workers of one component)."""
    wires: float
    """Bytes of one component on all wires."""
    stages: Stages
    """Workers are counted from the first one of the component."""


def best(costs: Costs, *, workers: int | None = None, copies: int | None = None) -> Stages | None:
    """The fastest plan, or None if none fits into memory.

    Of equally fast ones, that whose slowest worker is fastest, then that with fewest bytes on all wires. workers: at
    most so many are used. copies: of every stage; None = each stage may have its own number.
    """
    found = min(_ways(costs, workers, copies), key=lambda one: _rank(costs, one), default=None)
    return None if found is None else found.stages


def candidates(costs: Costs, *, workers: int | None = None, copies: int | None = None) -> Iterator[Stages]:
    """Plans of which each is better than all others with as many workers in some part of _Found.measure."""
    return (found.stages for found in _ways(costs, workers, copies))


def _ways(costs: Costs, workers: int | None, copies: int | None) -> Iterator[_Found]:
    at, top, level = points(costs), len(costs.cluster.levels), costs.cluster.levels[-1]
    search = _Search(costs, at, copies, costs.cluster.workers)
    size = search.size(top)
    for count in range(1, level.count + 1):
        if workers is None or count * size <= workers:
            if top == 1 and not costs.schedule.flushes:
                # How old parameters are depends on the number of all workers.
                search = _Search(costs, at, copies, count)
            yield from search.front(top, 0, len(at) - 1, count, 1, 0)


def _rank(costs: Costs, found: _Found) -> tuple[float, float, float]:
    if costs.schedule.flushes and len(costs.cluster.levels) == 1:
        return flushed.seconds(found.measure), found.measure[1], found.wires
    seconds, load, *_ = found.measure
    return max(seconds, costs.servers_s(load)), seconds, found.wires


def points(costs: Costs, most: int | None = None) -> list[int]:
    """Layers at which stages may begin, ascending, from 0 to the number of layers.

    Of a model with more than `most` of them, those between the neighbours that compute least together are left out.
    """
    found = [layer for layer in range(costs.count + 1) if costs.cut_allowed(layer)]
    if most is None:
        most = MOST_POINTS.get(len(costs.cluster.levels), FEW_POINTS)
    while len(found) > most + 1:
        inner = range(1, len(found) - 1)
        del found[min(inner, key=lambda i: (costs.total("seconds", found[i - 1], found[i + 1]), i))]
    return found


class _Search:
    """The tables of one search, filled as they are asked for. Layers are numbers of points."""

    def __init__(self, costs: Costs, at: Sequence[int], copies: int | None, slots: int) -> None:
        """slots: workers of all stages, or at most so many."""
        self.points = at
        self._costs = costs
        self._copies = copies
        self._slots = slots
        self._flat = len(costs.cluster.levels) == 1
        self._ordered = costs.cluster.memory_bytes != float("inf") or (self._flat and not costs.schedule.flushes)
        """What a stage needs depends on those after it."""
        self.front = functools.cache(self._front)
        self._whole = functools.cache(self._component)

    def size(self, level: int) -> int:
        """Workers of a component of this level, from 1 on."""
        size = 1
        for below in self._costs.cluster.levels[: level - 1]:
            size *= below.count
        return size

    def _front(self, level: int, i: int, j: int, count: int, copies: int, behind: int) -> Sequence[_Found]:
        """Ways to run layers i to j - 1 on exactly `count` components, each stage as often as there are `copies`.

        behind: workers of later stages, of all copies.
        """
        if j <= i or count < 1:
            return ()
        size, found = self.size(level), list(self._whole(level, i, j, count, copies, behind))
        for s, taken in itertools.product(range(i + 1, j), range(1, count)):
            left = count - taken
            rest = self.front(level, s, j, left, copies, behind)
            if not rest:
                continue
            later = behind + left * size * copies if self._ordered else 0
            for one, other in itertools.product(self._whole(level, i, s, taken, copies, later), rest):
                found.append(
                    _Found(
                        self._joined(one, other.measure, later),
                        one.wires + other.wires,
                        (*one.stages, *_moved(other.stages, taken * size)),
                    )
                )
        return _undominated(found)

    def _component(self, level: int, i: int, j: int, taken: int, copies: int, behind: int) -> Sequence[_Found]:
        """Ways to run layers i to j - 1 as one part, replicated on `taken` components."""
        copies, costs = copies * taken, self._costs
        first, end, size = self.points[i], self.points[j], self.size(level)
        if level == 1:
            single = self._single(first, end, copies, behind)
            inner: Iterable[_Found] = () if single is None else (single,)
        else:
            below = costs.cluster.levels[level - 2].count
            inner = [one for used in range(1, below + 1) for one in self.front(level - 1, i, j, used, copies, behind)]
        found = []
        for one in inner:
            stages = tuple(_replicated(stage, taken, size) for stage in one.stages)
            if self._flat:
                measure = self._measure(stages[0], None, behind)
            else:
                seconds, load = one.measure
                measure = max(seconds, self._link_s(level, first, end, taken, copies, load)), taken * load
            found.append(_Found(measure, taken * one.wires, stages))
        return _undominated(found)

    def _single(self, first: int, end: int, copies: int, behind: int) -> _Found | None:
        costs = self._costs
        if not costs.stage_allowed(first, end) or (self._copies is not None and copies != self._copies):
            return None
        if costs.cluster.memory_bytes != float("inf"):
            needed = costs.memory_bytes(first, end, copies=copies, behind=behind, slots=self._slots)
            if needed > costs.cluster.memory_bytes:
                return None
        parcels = sum(costs.parcels(first, end, copies)) / 2
        exchanged = (
            costs.ring_bytes(first, end, copies)
            if costs.cluster.sync == ALL_REDUCE
            else costs.total("push", first, end) + costs.total("pull", first, end)
        )
        stages = (PlannedStage(first=first, end=end, workers=(0,)),)
        return _Found((costs.compute_s(first, end, copies), costs.load(first, end)), exchanged + parcels, stages)

    def _measure(self, stage: PlannedStage, rest: flushed.Measure | None, behind: int) -> flushed.Measure:
        """Of a stage and those after it, of a flat network."""
        if self._costs.schedule.flushes:
            return flushed.measure(self._costs, stage, rest)
        return unbroken.measure(self._costs, stage, behind, self._slots, rest)

    def _joined(self, one: _Found, rest: flushed.Measure, behind: int) -> flushed.Measure:
        """The measure of one part and of the layers after it."""
        if self._flat:
            return self._measure(one.stages[0], rest, behind)
        return max(one.measure[0], rest[0]), one.measure[1] + rest[1]

    def _link_s(self, level: int, first: int, end: int, taken: int, copies: int, load: float) -> float:
        costs = self._costs
        if level == 1 and costs.cluster.sync != ALL_REDUCE:
            return costs.link_s(first, end, copies)
        exchanged = costs.ring_bytes(first, end, taken) if costs.cluster.sync == ALL_REDUCE else load
        return (max(costs.parcels(first, end, copies)) + exchanged) / costs.cluster.levels[level - 1].bytes_per_s


def _moved(stages: Stages, by: int) -> Stages:
    return tuple(
        PlannedStage(first=stage.first, end=stage.end, workers=tuple(worker + by for worker in stage.workers))
        for stage in stages
    )


def _replicated(stage: PlannedStage, times: int, size: int) -> PlannedStage:
    """On as many components: neighbouring numbers are those of different ones, as are neighbouring microbatches."""
    workers = tuple(worker + number * size for worker in stage.workers for number in range(times))
    return PlannedStage(first=stage.first, end=stage.end, workers=workers)


def _undominated(found: Iterable[_Found]) -> Sequence[_Found]:
    """Those than which none is as good in every part of the measure, and better or earlier in the list."""
    kept: list[_Found] = []
    for one in sorted(found, key=lambda one: (one.measure, one.wires)):
        if not any(all(map(operator.le, other.measure, one.measure)) for other in kept):
            kept.append(one)
    return tuple(kept)
