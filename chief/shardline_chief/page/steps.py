"""Reports of finished steps on their way to the log: joined over replicas, and held until the servers get that far.

A worker may say of any step that it is done, but the servers know. A report of a step far beyond theirs waits until
they get there, so that it can neither push out the steps before it nor stretch a curve to where nobody was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shardline.core.orders import StepReport

OPEN_STEPS = 64
"""A step with incomplete reports is written anyway once a step this much newer has one."""
HELD_EACH = 1 << 16
"""Reports of one task that wait; beyond that its oldest are dropped."""
LINES_EACH = 4096
"""Lines of a task that reports steps of its own, beside two for each step that the servers have reached."""


class StepBoard:
    """Joins the reports of a step's replicas into one line; a repeated report replaces the previous one."""

    def __init__(self, replicas: int, *, joined: bool) -> None:
        """joined: a step has one report per replica (synchronous). Otherwise every report is a line of its own."""
        self._replicas = replicas
        self._joined = joined
        self._open: dict[int, dict[int, StepReport]] = {}
        self._written = -1

    def add(self, report: StepReport) -> list[tuple[int, list[StepReport]]]:
        """Take in a report; returns (step, reports) of the steps that are now complete, ascending."""
        if not self._joined:
            return [(report.step, [report])]
        if report.step <= self._written:
            return []
        self._open.setdefault(report.step, {})[report.replica] = report
        ready = []
        for step in sorted(self._open):
            whole = len(self._open[step]) >= self._replicas
            if not whole and max(self._open) - step < OPEN_STEPS:
                break
            ready.append((step, [r for _, r in sorted(self._open.pop(step).items())]))
            self._written = step
        return ready

    def rest(self) -> list[tuple[int, list[StepReport]]]:
        """Steps that never became complete; call at the end."""
        rest = [(step, list(reports.values())) for step, reports in sorted(self._open.items())]
        self._open.clear()
        return rest


class HeldReports:
    """Reports that wait until the servers have reached their steps, or until training is known to run."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[StepReport]] = {}
        self._highest = self._before = 0.0
        """Highest step that the servers have reached so far, and before this timeline."""
        self._lines: Counter[str] = Counter()
        """Reports let through, by task."""
        self._dropped: Counter[str] = Counter()
        """Reports beyond what a task can have done, by task."""

    def add(self, task: str, reports: Iterable[StepReport]) -> None:
        waiting = [*self._waiting.get(task, ()), *reports]
        self._waiting[task] = waiting[-HELD_EACH:]
        self._dropped[task] += len(waiting[:-HELD_EACH])

    def due(self, reached: float, *, joined: bool) -> Iterator[tuple[str, list[StepReport]]]:
        """Remove and return the reports of steps up to OPEN_STEPS beyond the one that the servers have reached."""
        # Shards that go back by themselves count less than workers that count their own steps, and go on.
        reached += 0.0 if joined else self._before
        self._highest = max(self._highest, reached)
        for task, waiting in self._waiting.items():
            found = [report for report in waiting if report.step <= reached + OPEN_STEPS]
            if not found:
                continue
            self._waiting[task] = [report for report in waiting if report.step > reached + OPEN_STEPS]
            room = math.inf if joined else max(0.0, 2 * self._highest + LINES_EACH - self._lines[task])
            taken = found[: int(min(len(found), room))]
            self._lines[task] += len(taken)
            self._dropped[task] += len(found) - len(taken)
            yield task, taken

    def forget(self) -> None:
        """Drop those that still wait: their timeline is over."""
        self._waiting.clear()
        self._before = self._highest

    def end(self) -> Counter[str]:
        """The run is over: how many reports of each task were dropped because no server had reached their steps."""
        return self._dropped + Counter({task: len(reports) for task, reports in self._waiting.items()})
