"""Stages of neighbouring layers for a cluster, by dynamic programming: the best there are. Pure.

Narayanan et al.: PipeDream (2019), section 3.1. A^k(i..j, m), the slowest worker of layers i..j on m components of
level k, is the best of: one stage that all m replicate; or a stage on r of them, and A^k of the other layers on m - r.
What a component does alone is A^(k-1); a component of level 0 is a worker. In addition to theirs: memory, which depends
on the workers of later stages, so the first stage is split off, not the last; and what a step takes besides its slowest
worker's time. So A is a set of plans, of which none is better than another in all that counts: see forecast.measured().
With groups of workers it is (slowest worker or link, bytes for the servers), as if nothing had to
wait for anything else, and the plans in the set are compared by forecasts.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardline_pipeline.partition.costs import ALL_REDUCE, Costs, PlannedStage, Stages
from shardline_pipeline.partition.forecast import Measure, measured

MOST_POINTS, FEW_POINTS = {1: 20, 2: 20}, 12
"""Layers at which stages may begin, by number of levels: with more, neighbours that compute least are joined."""


@dataclass(frozen=True)
class _Found:
    measure: Measure
    """What a plan is compared by: the less of each the better. With groups, (seconds of the slowest worker or link in a
    step; bytes for the servers, of all workers of one component)."""
    wires: float
    """Bytes of one component on all wires."""
    stages: Stages
    """Workers are counted from the first one of the component."""


def candidates(costs: Costs, *, copies: int | None = None) -> Iterator[Stages]:
    """Plans of which each is better than all others with as many workers in some part of _Found.measure.

    copies: of every stage; None = each stage may have its own number.
    """
    at, top, level = points(costs), len(costs.cluster.levels), costs.cluster.levels[-1]
    search = _Search(costs, at, copies, costs.cluster.workers)
    for count in range(1, level.count + 1):
        if top == 1 and not costs.schedule.flushes:
            # How old parameters are depends on the number of all workers.
            search = _Search(costs, at, copies, count)
        yield from (found.stages for found in search.front(top, 0, len(at) - 1, count, 1, 0))


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
                measure: Measure = (max(one.measure[0], other.measure[0]), one.measure[1] + other.measure[1])
                if self._flat:
                    measure = measured(self._costs, one.stages[0], other.measure, later, self._slots)
                moved = tuple(_placed(stage, 1, 0, taken * size) for stage in other.stages)
                found.append(_Found(measure, one.wires + other.wires, (*one.stages, *moved)))
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
            stages = tuple(_placed(stage, taken, size, 0) for stage in one.stages)
            if self._flat:
                measure = measured(costs, stages[0], None, behind, self._slots)
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
        handed = sum(costs.activation_bytes(first, end, copies)) / 2
        exchanged = (
            costs.ring_bytes(first, end, copies)
            if costs.cluster.sync == ALL_REDUCE
            else costs.total("push", first, end) + costs.total("pull", first, end)
        )
        stages = (PlannedStage(first=first, end=end, workers=(0,)),)
        return _Found((costs.compute_s(first, end, copies), costs.load(first, end)), exchanged + handed, stages)

    def _link_s(self, level: int, first: int, end: int, taken: int, copies: int, load: float) -> float:
        costs = self._costs
        if level == 1 and costs.cluster.sync != ALL_REDUCE:
            return costs.link_s(first, end, copies)
        exchanged = costs.ring_bytes(first, end, taken) if costs.cluster.sync == ALL_REDUCE else load
        return (max(costs.activation_bytes(first, end, copies)) + exchanged) / costs.cluster.levels[
            level - 1
        ].bytes_per_s


def _placed(stage: PlannedStage, times: int, size: int, by: int) -> PlannedStage:
    """The stage on `times` components of `size` workers, `by` workers later.

    Neighbouring numbers are those of different components, as are neighbouring microbatches.
    """
    workers = tuple(worker + by + number * size for worker in stage.workers for number in range(times))
    return PlannedStage(first=stage.first, end=stage.end, workers=workers)


def _undominated(found: Iterable[_Found]) -> Sequence[_Found]:
    """Those than which none is as good in every part of the measure, and better or earlier in the list."""
    kept: list[_Found] = []
    for one in sorted(found, key=lambda one: (one.measure, one.wires)):
        if not any(all(map(operator.le, other.measure, one.measure)) for other in kept):
            kept.append(one)
    return tuple(kept)
