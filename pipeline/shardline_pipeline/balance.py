"""Cuts that leave as little as possible to whoever has most. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Size = Callable[[int, int, int], tuple[float, float]]
"""size(stage, first, end) of layers first to end - 1: what is compared, and what is added up among equals. The first is
infinite for layers that can't be that stage."""
MOST_WAYS = 100
"""Ways to the same layer that are followed, those whose busiest worker has least: of workers that all get more stages,
each split of the layers leaves less to one of them, so that otherwise nearly all would be."""


@dataclass(frozen=True)
class _Way:
    """Stages up to some layer."""

    largest: float
    """What the worker has that has most so far."""
    total: float
    cuts: tuple[int, ...]
    """The first layers of these stages."""
    open: tuple[float, ...]
    """What those workers have that get more stages."""


def balanced(points: Sequence[int], stages: int, size: Size, homes: Sequence[Sequence[int]] = ()) -> list[int] | None:
    """The first layers of stages 1, 2, ...; None if there are no such stages.

    points: layers at which a stage may begin, ascending, from 0 to the number of layers. homes: the workers of each
    stage; () = each has its own. The largest sum of the sizes of a worker's stages is as small as it can be, as far as
    MOST_WAYS show; of equals, the sum of the second sizes, and then the start of the last run.
    """
    homes = homes or [(stage,) for stage in range(stages)]
    shared = len({worker for own in homes for worker in own}) < sum(map(len, homes))
    # So large it is with the cuts that are best where each stage has a worker of its own.
    apart = balanced(points, stages, size) if shared else None
    most = _largest(points, apart, size, homes)
    # By the layer at which the stages so far end.
    best: dict[int, Sequence[_Way]] = {0: [_Way(0.0, 0.0, (), ())]}
    known: list[int] = []
    for stage in range(stages):
        later = sorted({*known, *homes[stage]} & {worker for own in homes[stage + 1 :] for worker in own})
        row: dict[int, Sequence[_Way]] = {}
        for end in points[1:]:
            ways = []
            for first, before in best.items():
                own, more = size(stage, first, end) if first < end else (math.inf, 0.0)
                if own == math.inf:
                    continue
                for way in before:
                    has = dict(zip(known, way.open, strict=True))
                    has.update({worker: has.get(worker, 0.0) + own for worker in homes[stage]})
                    largest = max(way.largest, *(has[worker] for worker in homes[stage]))
                    if largest <= most:
                        open_ = tuple(has[worker] for worker in later)
                        ways.append(_Way(largest, way.total + more, (*way.cuts, first), open_))
            if ways:
                # Those than which none leaves less to every worker, at most MOST_WAYS; the best of equals.
                kept: list[_Way] = []
                for one in sorted(ways, key=lambda way: (way.largest, way.total, way.cuts[-1])):
                    if not any(all(map(operator.le, other.open, one.open)) for other in kept):
                        kept.append(one)
                        if len(kept) == MOST_WAYS:
                            break
                row[end] = kept
        best, known = row, later
    found = best.get(points[-1])
    return [*found[0].cuts[1:]] if found else apart


def _largest(points: Sequence[int], cuts: Sequence[int] | None, size: Size, homes: Sequence[Sequence[int]]) -> float:
    if cuts is None:
        return math.inf
    has: dict[int, float] = {}
    for stage, (first, end) in enumerate(zip((0, *cuts), (*cuts, points[-1]), strict=True)):
        for worker in homes[stage]:
            has[worker] = has.get(worker, 0.0) + size(stage, first, end)[0]
    return max(has.values())
