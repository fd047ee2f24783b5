"""The passes of a pipeline that workers have told of: for the page, the status and the trace file."""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import shardline_pipeline as pipeline
from shardline.core.orders import PassReport
from shardline.core.spec import JobSpec
from shardline.core.status import StageStatus
from shardline_pipeline.timeline import Timeline, passes_in, trace

DRAWN, DRAWN_EACH = 1500, 40
"""Most passes that the page draws, and of each stage of a replica: as many of the newest steps as have no more."""


DRIFT = 1e-4
"""Seconds per second by which two clocks may run apart; quartz clocks stay below 1e-4."""


class ClockOffsets:
    """Offsets of senders' clocks, from messages that say when they were sent.

    A message arrives later than the sender's clock says by the offset and the time it took. The quickest message is the
    best measurement: on a local network it takes well below a millisecond, and about as long from every sender. Older
    measurements are trusted less, by DRIFT.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[float, float]] = {}
        """Offset, and when it was measured."""

    def heard(self, sender: Hashable, sent_s: float, now_s: float) -> float:
        """Take in a message; returns what has to be added to the sender's clock to get this one's."""
        offset_s = now_s - sent_s
        if sender in self._known:
            before_s, at_s = self._known[sender]
            offset_s = min(offset_s, before_s + DRIFT * (now_s - at_s))
        self._known[sender] = offset_s, now_s
        return offset_s

    def of(self, sender: Hashable) -> float | None:
        """What heard() has returned last; None if it was never called."""
        known = self._known.get(sender)
        return known[0] if known is not None else None


class PassBoard:
    """Passes on this chief's clock. Thread-safe: the control thread writes, the page's thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks = ClockOffsets()
        self._timeline: Timeline | None = None
        self._figures: tuple[StageStatus, ...] | None = ()
        """None: they have to be taken again."""
        self._job: tuple[str, str] = "", ""
        """Name and pipeline."""

    def begin(self, job: str, pipeline: str, *, stages: int, replicas: int, microbatches: int) -> None:
        """The job has this pipeline, of this shape. Call it as often as you like."""
        with self._lock:
            known = self._timeline
            if known is None or (known.stages, known.replicas, known.microbatches) != (stages, replicas, microbatches):
                self._job, self._figures = (job, pipeline), ()
                self._timeline = Timeline(stages, replicas, microbatches)

    def told(self, task: str, incarnation: int, passes: Sequence[PassReport], *, sent_s: float, now_s: float) -> None:
        """Take in what one heartbeat says. sent_s: when it was sent, on the clock of its passes; now_s: on this one."""
        with self._lock:
            if self._timeline is None:
                return
            before_s = self._clocks.of((task, incarnation))
            offset_s = self._clocks.heard((task, incarnation), sent_s, now_s)
            if before_s is not None and offset_s < before_s:
                # Else passes from before would lie between, or after, those of now.
                self._timeline.move(task, offset_s - before_s)
            self._timeline.add(task, passes, offset_s)
            self._figures = None

    def heard(
        self, job: JobSpec, life: tuple[str, int], passes: Sequence[PassReport], *, sent_s: float, now_s: float
    ) -> None:
        """begin() and told(), if the job has a pipeline."""
        if pipeline.of(job).staged:
            shape = {"stages": pipeline.stages(job), "replicas": job.replicas, "microbatches": job.accumulate}
            self.begin(job.name, job.pipeline, **shape)
            self.told(*life, passes, sent_s=sent_s, now_s=now_s)

    def read(self, job: JobSpec, trace: Mapping[str, Any]) -> None:
        """Take in the passes of a trace file."""
        passes = passes_in(trace)
        if not passes:
            return
        stages, microbatches = (
            1 + max(getattr(one.report, name) for one in passes) for name in ("stage", "microbatch")
        )
        self.begin(job.name, job.pipeline, stages=stages, replicas=job.replicas, microbatches=microbatches)
        for task in sorted({one.task for one in passes}):
            reports = [one.report for one in passes if one.task == task]
            self.told(task, 0, reports, sent_s=0.0, now_s=0.0)

    def figures(self) -> tuple[StageStatus, ...]:
        """Each stage over the recent steps; none without a pipeline, and before its first step is done."""
        with self._lock:
            if self._figures is None and self._timeline is not None:
                self._figures = self._timeline.figures()
            return self._figures or ()

    def recent(self) -> str:
        """The newest whole steps, and what was computed between their passes, as JSON for the page."""
        with self._lock:
            timeline = self._timeline
            if timeline is None:
                return json.dumps({"rows": [], "passes": []})
            each = 2 * timeline.microbatches
            most = min(DRAWN_EACH // each, DRAWN // (each * timeline.stages * timeline.replicas))
            steps = timeline.whole(max(1, most))
            found = timeline.around(steps)
            begin_s = min((one.start_s for one in found), default=0.0)
            rows = sorted({(one.report.stage, one.report.replica, one.task) for one in found})
            number = {row: place for place, row in enumerate(rows)}
            passes = [
                [
                    number[one.report.stage, one.report.replica, one.task],
                    one.report.step,
                    one.report.microbatch,
                    int(one.report.back),
                    round(1000 * (one.start_s - begin_s), 3),
                    round(1000 * (one.end_s - begin_s), 3),
                    one.report.version,
                    one.report.held,
                ]
                for one in found
            ]
        names = [{"stage": stage, "replica": replica, "task": task} for stage, replica, task in rows]
        return json.dumps({"rows": names, "passes": passes}, separators=(",", ":"))

    def trace(self) -> dict[str, Any] | None:
        """All passes that are kept, as a trace; None without a pipeline."""
        with self._lock:
            if self._timeline is None:
                return None
            passes = self._timeline.taken()
        return trace(passes, *self._job)
