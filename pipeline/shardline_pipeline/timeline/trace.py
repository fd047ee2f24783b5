"""Trace files of a pipeline, for ui.perfetto.dev and chrome://tracing.

Format: Google: Trace Event Format, the JSON object with complete events (X), counters (C), flows (s, f), metadata (M).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardline.core.orders import PassReport
from shardline_pipeline.timeline.passes import TaskPass, senders

FACTS = ("step", "microbatch", "stage", "replica", "version", "held")
"""Fields of a PassReport that each pass has as arguments."""


def trace(passes: Sequence[TaskPass], job: str = "", pipeline: str = "") -> dict[str, Any]:
    """A trace as JSON values: a process per task, in it a row per stage of a replica and a curve of its stash.

    Times are microseconds since the first pass. Arrows lead from a pass to the one that needs its output.
    """
    begin_s = min((one.start_s for one in passes), default=0.0)
    tasks = {task: number for number, task in enumerate(sorted({one.task for one in passes}, key=_natural))}
    replicas = 1 + max((one.report.replica for one in passes), default=0)

    def place(one: TaskPass) -> dict[str, Any]:
        return {"pid": tasks[one.task], "tid": one.report.stage * replicas + one.report.replica}

    def us(time_s: float) -> float:
        return round(1e6 * (time_s - begin_s), 3)

    events: list[dict[str, Any]] = [*_names(passes, tasks, place)]
    for one in sorted(passes, key=lambda one: one.start_s):
        report, what = one.report, "backward" if one.report.back else "forward"
        facts = {name: getattr(report, name) for name in FACTS}
        length_us = round(1e6 * (report.end_s - report.start_s), 3)
        begun = {"ph": "X", "name": f"{what} {report.microbatch}", "cat": what, "ts": us(one.start_s)}
        events.append({**begun, "dur": length_us, **place(one), "args": facts})
        stash = f"held: stage {report.stage}, replica {report.replica}"
        left = report.held - report.back
        held = {"ph": "C", "name": stash, "ts": us(one.end_s), "pid": tasks[one.task]}
        events.append({**held, "args": {"microbatches": left}})
    for number, (one, sender) in enumerate(senders(passes).items()):
        arrow = {"name": "gradient" if one.report.back else "activation", "cat": "parcel", "id": number}
        events.append({**arrow, "ph": "s", "ts": us(sender.end_s), **place(sender)})
        # An arrow must not end before its slice begins.
        events.append({**arrow, "ph": "f", "bp": "e", "ts": us(max(one.start_s, begin_s)), **place(one)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": job, "pipeline": pipeline}}


def passes_in(found: Mapping[str, Any]) -> list[TaskPass]:
    """The passes that a trace was made of, with times since the first one; [] if it is no such trace."""
    try:
        events = found["traceEvents"]
        tasks = {event["pid"]: str(event["args"]["name"]) for event in events if event["name"] == "process_name"}
        return [
            TaskPass(
                tasks[event["pid"]],
                PassReport(
                    **{name: int(event["args"][name]) for name in FACTS},
                    back=event["cat"] == "backward",
                    start_s=event["ts"] / 1e6,
                    end_s=(event["ts"] + event["dur"]) / 1e6,
                ),
            )
            for event in events
            if event["ph"] == "X"
        ]
    except (KeyError, TypeError, ValueError):
        return []


def _names(passes: Iterable[TaskPass], tasks: dict[str, int], place: Any) -> Iterable[dict[str, Any]]:
    for task, number in tasks.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": task}}
    rows = {(place(one)["pid"], place(one)["tid"]): one.report for one in passes}
    for (pid, tid), report in sorted(rows.items()):
        name = f"stage {report.stage}, replica {report.replica}"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _natural(task: str) -> tuple[str, int]:
    role, _, index = task.partition("/")
    return role, int(index) if index.isdigit() else 0
