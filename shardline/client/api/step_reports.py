"""Reports of a worker's replicas about the open step, for metrics and the chief."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shardline.core.orders import StepReport


class StepReports:
    """The open step's reports, one per replica. Used by the session's thread."""

    def __init__(self) -> None:
        self._reports: dict[int, StepReport] = {}
        self._losses: dict[int, list[float]] = {}
        self.contributed = False
        """Some replica has contributed to the open tick."""
        self._data_s = 0.0
        """Seconds of waiting for batches since the last report."""
        self.began_s = time.monotonic()
        """When the open step began."""

    def read(self, seconds: float) -> None:
        """Note that the next report's batch took so long to come."""
        self._data_s += seconds

    def add(self, report: StepReport, *, waited_s: float) -> None:
        """Add a replica's report on the open tick. waited_s: seconds it had to wait for the previous step.

        compute_s and data_s are measured here; loss and samples are those of the tick.
        """
        before = self._reports.get(report.replica)
        losses = self._losses.setdefault(report.replica, [])
        losses.append(report.loss)
        spent_s = sum(item.compute_s + item.data_s for item in self._reports.values())
        compute_s = time.monotonic() - self.began_s - waited_s - spent_s - self._data_s
        self._reports[report.replica] = replace(
            report,
            loss=losses[0] if len(losses) == 1 else math.fsum(losses) / len(losses),
            samples=report.samples + (before.samples if before is not None else 0),
            compute_s=compute_s + (before.compute_s if before is not None else 0.0),
            data_s=self._data_s + (before.data_s if before is not None else 0.0),
        )
        self._data_s = 0.0
        self.contributed = True

    def next_tick(self) -> None:
        """Begin another tick of the same step."""
        self.contributed = False

    def take(self) -> tuple[StepReport, ...]:
        """Return the reports, one per replica, when the step is sent, and start over."""
        taken = tuple(self._reports.values())
        self.clear()
        return taken

    def clear(self) -> None:
        """Begin another step, or the same one again."""
        self._reports.clear()
        self._losses.clear()
        self.contributed = False
        self._data_s = 0.0
        self.began_s = time.monotonic()
