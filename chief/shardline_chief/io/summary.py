"""The summary JSON of a finished run, and the overview for `shardline status`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardline import codecs, consistency, division, methods
from shardline.core.orders import REPEATED
from shardline.core.spec import JobSpec
from shardline.core.status import ChiefStatus, ShardStatus, TaskStatus, Traffic
from shardline.host import files
from shardline_chief.io.reporter import Reporter
from shardline_chief.rules.actions import JournalLine
from shardline_chief.rules.program import Program
from shardline_chief.rules.views import counting, done

SUMMARY = "summary.json"
"""The file, in OUT."""


def trainers(reporter: Reporter) -> dict[str, dict[str, Any]]:
    """Figures of each task that trains, since this chief's start."""
    return {task: pace.whole() for task, pace in sorted(reporter.paces.items())}


def stages(reporter: Reporter) -> list[dict[str, Any]]:
    """Figures of each stage of a pipeline over its last steps; [] without one."""
    return [dataclasses.asdict(one) | {"tasks": list(one.tasks)} for one in reporter.passes.figures()]


def tables(shards: Iterable[ShardStatus]) -> dict[str, dict[str, int]]:
    """Counts of each table, as TableStatus has them, over all shards."""
    found: dict[str, Counter[str]] = {}
    for held in (one for shard in shards for one in shard.tables):
        counts = dataclasses.asdict(held)
        found.setdefault(counts.pop("table"), Counter()).update(counts)
    return {name: dict(counts) for name, counts in sorted(found.items())}


def summary(program: Program, reporter: Reporter, *, sha256: str, out: Path, now_s: float) -> dict[str, Any]:
    """The run's result, for summary.json. sha256: digest of the last checkpoint's parameters, "" if there is none."""
    state = program.state
    seconds = state.figures.seconds(now_s)
    trained = max(0, state.progress.step - state.progress.first_step)
    shards = [state.progress.shards[number] for number in sorted(state.progress.shards)]
    pushes = sum(shard.pushes for shard in shards)
    through_servers = (moved for task, moved in state.figures.traffic.items() if task.startswith("ps/"))
    traffic = functools.reduce(operator.add, through_servers, Traffic())
    best, scores = state.figures.best, state.figures.metrics
    last = max((step for step, metrics in scores.items() if metrics), default=None)
    return {
        "job": state.job.name if state.job is not None else "",
        "exit_code": state.exit_code,
        "reason": state.reason,
        "steps": state.progress.step,
        "done": done(state),
        "counting": dataclasses.asdict(counting(state.job)) if state.job is not None else None,
        "first_step": state.progress.first_step,
        "seconds": round(seconds, 6),
        "steps_per_second": trained / seconds if seconds > 0 else 0.0,
        "evaluation": {
            "last": None if last is None else {"step": last, "metrics": _plain(scores[last])},
            "best": None if best is None else {"step": best[0], "metrics": _plain(best[1])},
        },
        "unscored": state.figures.unscored.get(state.saves.final_step, ""),
        "sha256": sha256,
        "bytes": {
            "push": {"raw": traffic.push_raw_bytes, "wire": traffic.push_wire_bytes},
            "pull": {"raw": traffic.pull_raw_bytes, "wire": traffic.pull_wire_bytes},
        },
        "staleness": {
            "mean": sum(shard.staleness_sum for shard in shards) / pushes if pushes else 0.0,
            "max": max((shard.staleness_max for shard in shards), default=0),
        },
        "trainers": trainers(reporter),
        "stages": stages(reporter),
        "versions": [shard.version for shard in shards],
        "skipped_steps": max((shard.skipped_steps for shard in shards), default=0),
        "contributions": {
            task: {"used": state.choices.used[task], "dropped": state.choices.dropped[task]}
            for task in sorted(state.choices.used | state.choices.dropped)
        },
        "duplicate_mismatches": sum(shard.duplicate_mismatches for shard in shards),
        "tables": tables(shards),
        "repeated_batches": state.figures.total(REPEATED)
        + (state.work.leases.repeated if state.work.leases is not None else 0),
        "dropped_memories": state.figures.dropped_memories,
        "lost_updates": state.losses.updates(state.figures.lives),
        "recoveries": [dataclasses.asdict(recovered) for recovered in state.losses.recoveries],
        "chief_restarts": state.losses.failovers,
        "checkpoint": state.saves.checkpoint_path or None,
        "checkpoint_step": state.saves.checkpoint_step,
        "methods": methods.chosen(state.job) if state.job is not None else {},
        "consistency": consistency.named(state.job.consistency) if state.job is not None else "",
        "replicas": state.job.replicas if state.job is not None else 0,
        "workers": state.work.most_trainers,
        "ps": len(state.settings.ps),
        "out": str(out),
    }


def _plain(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """The metrics for JSON, which has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class SummaryFile:
    """summary.json: written when the job has ended, and again once tasks have told of their last steps."""

    def __init__(self, program: Program, reporter: Reporter, out: Path) -> None:
        self._program = program
        self._reporter = reporter
        self._out = out
        self._value: dict[str, Any] = {}

    def value(self, sha256: str, now_s: float) -> dict[str, Any]:
        """See summary(). If another chief ended the job, its figures: tasks have told this one little."""
        found = summary(self._program, self._reporter, sha256=sha256, out=self._out, now_s=now_s)
        before = self._program.state.settings.before
        if not before or before["exit_code"] != found["exit_code"]:
            return found
        return {**before, **{name: found[name] for name in ("reason", "sha256", "chief_restarts", "out")}}

    def noted(self, record: JournalLine, now_s: float) -> Mapping[str, Any]:
        """Fields of a journal entry: with the end goes the summary, for a chief that is started after it."""
        if record.kind != "ended":
            return record.fields
        return {**record.fields, "summary": self.value("", now_s)}

    def write(self, value: dict[str, Any]) -> None:
        """Write a summary; if that fails, there is none, and an event says so."""
        self._value = value
        try:
            write_json(self._out / SUMMARY, value)
        except OSError as error:
            self._reporter.event("summary_failed", f"no summary: {self._out}: {error.strerror}", "error", {})
            # A summary of an earlier run in this folder would be mistaken for this run's.
            with contextlib.suppress(OSError):
                (self._out / SUMMARY).unlink(missing_ok=True)

    def complete(self) -> None:
        """Add what tasks told when they left."""
        found = {"trainers": trainers(self._reporter), "stages": stages(self._reporter)}
        if not self._program.state.settings.before and found != {name: self._value.get(name) for name in found}:
            self.write({**self._value, **found})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file atomically: readers see the old content or the new. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, f"{json.dumps(value, indent=2)}\n".encode())


def overview(program: Program, reporter: Reporter, out: Path, now_s: float, *, page: str = "") -> ChiefStatus:
    """The job's current status. page: address of the chief's own page."""
    state = program.state
    rows = tuple(_with_rates(row, reporter) for row in program.rows(now_s))
    now = time.time()
    still = program.standstill(now_s)
    # Tasks of the cluster spec that have never joined.
    counts = state.tasks.expected()
    there = {row.task for row in rows}
    names = (f"{role}/{index}" for role, count in counts.items() for index in range(count))
    return ChiefStatus(
        **facts(state.job),
        **scores(state.figures.metrics, state.figures.best),
        phase=state.phase.name.lower(),
        step=state.progress.step,
        done=done(state),
        first_step=state.progress.first_step,
        loss=reporter.loss,
        steps_per_s=reporter.step_rate.per_second if still is None else 0.0,
        bytes_per_s=reporter.byte_rate.per_second,
        seconds=state.figures.seconds(now_s),
        tasks=rows,
        checkpoint_step=state.saves.checkpoint_step,
        checkpoint_path=state.saves.checkpoint_path,
        checkpoints=reporter.shelf.list(now),
        said=tuple(reporter.said),
        exit_code=state.exit_code,
        reason=state.reason,
        out_dir=str(out),
        time=now,
        missing=tuple(name for name in names if name not in there),
        staleness=reporter.staleness,
        staleness_max=max((shard.staleness_max for shard in state.progress.shards.values()), default=0),
        push_bytes_per_s=reporter.push_rate.per_second,
        pull_bytes_per_s=reporter.pull_rate.per_second,
        dead_s=state.timeouts.dead_s,
        shard_bytes=tuple(shard.nbytes for shard in state.layout.plan.shards) if state.layout.plan is not None else (),
        page=page,
        stages=reporter.passes.figures(),
        standstill=still,
        faults=tuple(fault for fault in (*state.figures.faults.values(), reporter.failure) if fault),
    )


def _with_rates(row: TaskStatus, reporter: Reporter) -> TaskStatus:
    push, pull = reporter.task_rates.get(row.task, (None, None))
    pace = reporter.paces.get(row.task)
    return dataclasses.replace(
        row,
        push_bytes_per_s=push.per_second if push is not None else 0.0,
        pull_bytes_per_s=pull.per_second if pull is not None else 0.0,
        links=reporter.links.of(row.task, row.links),
        steps_per_s=pace.rate.per_second if pace is not None else 0.0,
        **(pace.means() if pace is not None else {}),
    )


def facts(job: JobSpec | None) -> dict[str, Any]:
    """The fields of a ChiefStatus that come from the job alone."""
    if job is None:
        return {}
    return {
        "job": job.name,
        "steps": job.steps,
        "counting": counting(job),
        "replicas": job.replicas,
        "consistency": consistency.named(job.consistency),
        "rule": job.rule.name,
        "codec_up": str(codecs.of(job).ups[0]),
        "codec_down": str(codecs.of(job).downs[0]),
        "codec_parcels": division.of(job).codec,
    }


def scores(metrics: Mapping[int, Mapping[str, float]], best: tuple[int, Mapping[str, float]] | None) -> dict[str, Any]:
    """The fields of a ChiefStatus that tell the newest score and the best. metrics: scores by step, {} if none."""
    last = max((step for step, score in metrics.items() if score), default=-1)
    best_step, best_score = best or (-1, {})
    return {
        "last_metrics_step": last,
        "last_metrics": dict(metrics.get(last, {})),
        "best_step": best_step,
        "best_metrics": dict(best_score),
    }
