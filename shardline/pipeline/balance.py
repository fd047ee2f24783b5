"""Cuts that make the largest stage as small as possible. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Size = Callable[[int, int, int], tuple[float, float]]
"""size(stage, first, end) of layers first to end - 1: what the largest one counts by, and what all are added up by
among equals. The first is infinite for layers that can't be that stage."""


def balanced(points: Sequence[int], stages: int, size: Size) -> list[int] | None:
    """The first layers of stages 1, 2, ...; None if there are no such stages.

    points: layers at which a stage may begin, ascending, from 0 to the number of layers. The largest of `stages` runs
    is as small as it can be; of equals, the sum of the second sizes, and then the start of the last run.
    """
    # By the layer at which the stages so far end: (largest, sum), and their cuts.
    best: dict[int, tuple[tuple[float, float], list[int]]] = {0: ((0.0, 0.0), [])}
    for stage in range(stages):
        row = {}
        for end in points[1:]:
            ways = []
            for first, ((largest, total), cuts) in best.items():
                if first < end:
                    own, more = size(stage, first, end)
                    ways.append(((max(largest, own), total + more), first, cuts))
            score, first, cuts = min(ways, default=((math.inf, 0.0), 0, []))
            if score[0] < math.inf:
                row[end] = (score, [*cuts, first])
        best = row
    return best[points[-1]][1][1:] if points[-1] in best else None
