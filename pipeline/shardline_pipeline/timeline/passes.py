"""The recent passes of a pipeline, and how busy its stages are."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardline.core.orders import PassReport
from shardline.core.status import StageStatus

KEPT = 10_000
"""Most passes kept: a trace file of 4 MB."""
WINDOW = 16
"""Steps over which figures are taken."""
Place = tuple[int, int, int, bool]
"""(replica, stage, microbatch, back)."""


@dataclass(eq=False)
class TaskPass:
    """A pass, and its times on a clock that all tasks share."""

    task: str
    report: PassReport
    """Its times are on a clock of the process that computed it."""
    offset_s: float = 0.0
    """Added to those."""

    @property
    def start_s(self) -> float:
        return self.report.start_s + self.offset_s

    @property
    def end_s(self) -> float:
        return self.report.end_s + self.offset_s


class Timeline:
    """Passes of one job, in bounded memory.

    Figures are taken over the newest steps of which all passes are known. A step that was begun again counts when each
    of its passes was reported again.
    """

    def __init__(self, stages: int, replicas: int, microbatches: int, *, kept: int = KEPT) -> None:
        self.stages = stages
        self.replicas = replicas
        self.microbatches = microbatches
        self._kept = kept
        self.passes: deque[TaskPass] = deque(maxlen=kept)
        """In the order in which they became known."""
        self._steps: dict[int, dict[Place, TaskPass]] = {}
        """By step, the one that was heard of last at the end."""

    def add(self, task: str, reports: Iterable[PassReport], offset_s: float = 0.0) -> None:
        """Take in passes. Those that the job can't have are ignored, since anyone may report anything."""
        for one in reports:
            found = TaskPass(task, one, offset_s)
            fits = one.replica < self.replicas and one.stage < self.stages and one.microbatch < self.microbatches
            if not (fits and math.isfinite(found.start_s) and found.start_s <= found.end_s < math.inf):
                continue
            self.passes.append(found)
            place = (one.replica, one.stage, one.microbatch, one.back)
            step = self._steps.pop(one.step, {})
            if place in step:
                # The step was begun again.
                step = {}
            step[place] = found
            self._steps[one.step] = step
        while len(self._steps) > 2 * WINDOW or (
            len(self._steps) > 1 and sum(map(len, self._steps.values())) > self._kept
        ):
            del self._steps[next(iter(self._steps))]

    def move(self, task: str, by_s: float) -> None:
        """Correct the times of a task's passes, since more is known of its clock."""
        # A pass of a step may be none of the kept ones any more.
        known = itertools.chain(self.passes, *(step.values() for step in self._steps.values()))
        for one in {id(one): one for one in known if one.task == task}.values():
            one.offset_s += by_s

    def taken(self) -> list[TaskPass]:
        """All passes, with times that stay as they are now."""
        return [TaskPass(one.task, one.report, one.offset_s) for one in self.passes]

    def whole(self, most: int = WINDOW) -> list[int]:
        """The newest steps of which all passes are known, in the order in which they were heard of."""
        count = 2 * self.stages * self.replicas * self.microbatches
        return [number for number, step in self._steps.items() if len(step) == count][-most:]

    def of(self, steps: Sequence[int]) -> list[TaskPass]:
        """Passes of some steps, by their start."""
        found = [one for number in steps for one in self._steps.get(number, {}).values()]
        return sorted(found, key=lambda one: one.start_s)

    def around(self, steps: Sequence[int]) -> list[TaskPass]:
        """Passes of some steps, and those of others that lie between them: without a flush there are many."""
        own = self.of(steps)
        if not own:
            return []
        start_s, end_s = _span(own)
        return [one for one in self.of(list(self._steps)) if start_s <= one.start_s and one.end_s <= end_s]

    def figures(self) -> tuple[StageStatus, ...]:
        """Every stage's figures over the newest whole steps; none before the first of them."""
        steps = self.whole()
        if not steps:
            return ()
        spans: list[tuple[float, float]] = []
        for start_s, end_s in sorted(_span(self._steps[number].values()) for number in steps):
            if spans and start_s <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], end_s)
            else:
                spans.append((start_s, end_s))
        length_s = sum(end_s - start_s for start_s, end_s in spans)
        # Without a flush, passes of other steps are between those of these.
        busy, own = [0.0] * self.stages, set(steps)
        for number, step in self._steps.items():
            for one in step.values():
                busy[one.report.stage] += one.end_s - one.start_s if number in own else _inside(one, spans)
        found = self.of(steps)
        return tuple(
            _stage(stage, [one for one in found if one.report.stage == stage], busy[stage] / self.replicas, length_s)
            for stage in range(self.stages)
        )


def _stage(stage: int, passes: Sequence[TaskPass], busy_s: float, length_s: float) -> StageStatus:
    reports = [one.report for one in passes]
    return StageStatus(
        stage=stage,
        tasks=tuple(sorted({one.task for one in passes})),
        bubble=max(0.0, 1.0 - busy_s / length_s) if length_s > 0.0 else 0.0,
        forward_s=_mean([one.end_s - one.start_s for one in reports if not one.back]),
        backward_s=_mean([one.end_s - one.start_s for one in reports if one.back]),
        held=max(one.held for one in reports),
        behind=max(max(0, one.step - one.version) for one in reports),
        # What a step's backward passes need, up to the version with which it begins.
        versions=max(1 + max(0, one.step - one.version) for one in reports if one.back),
    )


def _span(passes: Iterable[TaskPass]) -> tuple[float, float]:
    own = list(passes)
    return min(one.start_s for one in own), max(one.end_s for one in own)


def _inside(one: TaskPass, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of a pass that are in these times, which do not overlap."""
    inside_s = 0.0
    if one.end_s <= spans[0][0]:
        return inside_s
    for start_s, end_s in spans[bisect.bisect_left(spans, one.start_s, key=lambda span: span[1]) :]:
        if start_s >= one.end_s:
            break
        inside_s += min(one.end_s, end_s) - max(one.start_s, start_s)
    return inside_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def senders(passes: Iterable[TaskPass]) -> Mapping[TaskPass, TaskPass]:
    """The pass that each one waited for in the stage before it, or for a backward pass behind it, where it is known."""
    found: dict[tuple[int, Place], list[TaskPass]] = {}
    ordered = sorted(passes, key=lambda one: one.end_s)
    for one in ordered:
        report = one.report
        found.setdefault((report.step, (report.replica, report.stage, report.microbatch, report.back)), []).append(one)
    sent: dict[TaskPass, TaskPass] = {}
    for one in ordered:
        report = one.report
        before = report.stage + 1 if report.back else report.stage - 1
        made = found.get((report.step, (report.replica, before, report.microbatch, report.back)))
        if made:
            # The newest of a step that was begun again. Clocks may differ by more than a parcel takes.
            newest = bisect.bisect_right(made, one.end_s, key=lambda one: one.end_s)
            sent[one] = made[max(0, newest - 1)]
    return sent
