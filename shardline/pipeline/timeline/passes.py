"""The recent passes of a pipeline, and how busy its stages are."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardline.core.orders import PassReport
from shardline.core.status import StageStatus

KEPT = 10_000
"""Most passes kept: a trace file of 4 MB."""
WINDOW = 16
"""Steps over which figures are taken."""
Place = tuple[int, int, int, bool]
"""(replica, stage, microbatch, back)."""


@dataclass(frozen=True)
class TaskPass:
    """A pass, its times on a clock that all tasks share."""

    task: str
    report: PassReport


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

    def add(self, task: str, reports: Iterable[PassReport]) -> None:
        """Take in passes. Those that the job can't have are ignored, since anyone may report anything."""
        for one in reports:
            fits = one.replica < self.replicas and one.stage < self.stages and one.microbatch < self.microbatches
            if not (fits and math.isfinite(one.start_s) and one.start_s <= one.end_s < math.inf):
                continue
            found = TaskPass(task, one)
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

        def moved(one: TaskPass) -> TaskPass:
            return TaskPass(task, later(one.report, by_s)) if one.task == task else one

        self.passes = deque(map(moved, self.passes), maxlen=self._kept)
        self._steps = {
            number: {place: moved(one) for place, one in step.items()} for number, step in self._steps.items()
        }

    def whole(self, most: int = WINDOW) -> list[int]:
        """The newest steps of which all passes are known, in the order in which they were heard of."""
        count = 2 * self.stages * self.replicas * self.microbatches
        return [number for number, step in self._steps.items() if len(step) == count][-most:]

    def of(self, steps: Sequence[int]) -> list[TaskPass]:
        """Passes of some steps, by their start."""
        found = [one for number in steps for one in self._steps.get(number, {}).values()]
        return sorted(found, key=lambda one: one.report.start_s)

    def around(self, steps: Sequence[int]) -> list[TaskPass]:
        """Passes of some steps, and those of others that lie between them: without a flush there are many."""
        own = self.of(steps)
        if not own:
            return []
        start_s, end_s = _span(own)
        return [
            one for one in self.of(list(self._steps)) if start_s <= one.report.start_s and one.report.end_s <= end_s
        ]

    def figures(self) -> tuple[StageStatus, ...]:
        """Every stage's figures over the newest whole steps; none before the first of them."""
        steps = self.whole()
        if not steps:
            return ()
        spans = _union(_span(self._steps[number].values()) for number in steps)
        length_s = sum(end_s - start_s for start_s, end_s in spans)
        # Without a flush, passes of other steps are between those of these.
        busy = [0.0] * self.stages
        for step in self._steps.values():
            for one in step.values():
                busy[one.report.stage] += _inside(one.report, spans)
        found = self.of(steps)
        return tuple(
            _stage(stage, [one for one in found if one.report.stage == stage], busy[stage] / self.replicas, length_s)
            for stage in range(self.stages)
        )


def later(report: PassReport, by_s: float) -> PassReport:
    """A pass at another time."""
    return replace(report, start_s=report.start_s + by_s, end_s=report.end_s + by_s)


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
    reports = [one.report for one in passes]
    return min(one.start_s for one in reports), max(one.end_s for one in reports)


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, without overlaps, ascending."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if found and start_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((start_s, end_s))
    return found


def _inside(report: PassReport, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of a pass that are in these times, which do not overlap."""
    inside_s = 0.0
    for start_s, end_s in spans[bisect.bisect_left(spans, report.start_s, key=lambda span: span[1]) :]:
        if start_s >= report.end_s:
            break
        inside_s += min(report.end_s, end_s) - max(report.start_s, start_s)
    return inside_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def senders(passes: Iterable[TaskPass]) -> Mapping[TaskPass, TaskPass]:
    """The pass that each one waited for in the stage before it, or for a backward pass behind it, where it is known."""
    found: dict[tuple[int, Place], list[TaskPass]] = {}
    ordered = sorted(passes, key=lambda one: one.report.end_s)
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
            newest = bisect.bisect_right(made, report.end_s, key=lambda one: one.report.end_s)
            sent[one] = made[max(0, newest - 1)]
    return sent
