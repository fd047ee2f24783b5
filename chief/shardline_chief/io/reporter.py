"""What the chief records for people: events, steps and rates as JSON lines, TensorBoard event files, metrics.

Steps are identified by (timeline, step): after a rollback a step number occurs again, and both entries are kept. A
failing disk costs the logs, never the training, and is reported once. A chief that takes over a run rebuilds its curves
from these files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from shardline.core.orders import StepReport
from shardline.core.spec import JobSpec
from shardline.core.status import MEASURED_RARELY, STEP_MEANS, CheckpointStatus, EventStatus, PeerBytes, TaskLinks
from shardline.host import files
from shardline.observability.metrics import Metrics
from shardline_chief.io.trackers import Trackers
from shardline_chief.page.board import Passes, passes as new_passes
from shardline_chief.page.history import History
from shardline_chief.page.past import EVENTS_SHOWN, STALENESS, add_rates, recall, to_line
from shardline_chief.page.steps import HeldReports, StepBoard
from shardline_chief.rules.standstill import patience_s

log = logging.getLogger("shardline_chief")

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
TAIL_BYTES = 1 << 18
"""Bytes of an earlier chief's log searched for steps that are reported again: the steps of a few heartbeats."""
WINDOW_S = 5.0
RATES_EVERY_S = 2.0
"""Seconds between two lines of rates.jsonl: 6 MB a day."""
TRACE = "pipeline-trace.json"
SECONDS = ("data_s", "compute_s", "exchange_s", "blocked_s")
"""Durations in steps.jsonl: of the slowest of a step's replicas."""
LAST_STEPS = 50
"""Steps that a task's current means are taken over."""
STALENESSES = 1024
"""Different values of staleness that are counted for each task; others are left out."""
MOST_PAIRS = 4096
"""Pairs of tasks whose bytes are followed at most; of more, none are shown."""
SENTENCE = 4000
"""Characters of an event that are kept: 50 of them are in each status."""

F = TypeVar("F", bound=Callable[..., Any])


def for_people(method: F) -> F:
    """Make a failure of a method of this class cost what it shows, and not the run: it is logged once per method."""
    failed: set[type[Exception]] = set()

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if type(error) not in failed:
                failed.add(type(error))
                log.exception("%s failed; the run continues without it", method.__qualname__)
            return None

    return cast(F, guarded)


class Rate:
    """Units per second over the last WINDOW_S seconds, from readings of a counter.

    A counter is read more often than its task reports it, so only changed readings count; otherwise the rate would
    swing between two values. If a counter stands still for much longer than usual, the rate is 0.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()
        self._now_s = 0.0

    def add(self, value: float, now_s: float) -> None:
        """Note a reading; if the counter went back (its task was replaced), start again."""
        self._now_s = now_s
        if self._readings and value == self._readings[-1][1]:
            return
        if self._readings and value < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((now_s, value))
        while len(self._readings) > 2 and now_s - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()

    @property
    def per_second(self) -> float:
        """Units per second; 0 if there are too few readings."""
        if len(self._readings) < 2:
            return 0.0
        (from_s, first), (to_s, last) = self._readings[0], self._readings[-1]
        usual_s = (to_s - from_s) / (len(self._readings) - 1)
        if to_s <= from_s or self._now_s - to_s >= patience_s(usual_s):
            return 0.0
        return (last - first) / (to_s - from_s)


class TaskSpeed:
    """Speed and recent steps of one task that trains."""

    def __init__(self) -> None:
        self.rate = Rate()
        self.steps = 0
        """Steps reported so far; a worker with several replicas reports each step several times in a row."""
        self._last: deque[StepReport] = deque(maxlen=LAST_STEPS)
        self._stale: Counter[int] = Counter()
        self._blocked_s = 0.0

    def add(self, report: StepReport) -> None:
        another = not self._last or self._last[-1].step != report.step
        self.steps += another
        if another:
            if report.staleness in self._stale or len(self._stale) < STALENESSES:
                self._stale[report.staleness] += 1
            self._blocked_s += report.blocked_s
        self._last.append(report)

    def whole(self) -> dict[str, Any]:
        """Figures of all steps, for JSON. staleness: number of steps by staleness. drift, gap: recent means."""
        return {
            "steps": self.steps,
            "blocked_seconds": round(self._blocked_s, 6),
            "staleness": {str(versions): count for versions, count in sorted(self._stale.items())},
            **{name: _mean_of(name, self._last) for name in MEASURED_RARELY},
        }

    def means(self) -> dict[str, Any]:
        """Figures of the recent steps; see StepMeans. 0 before the first."""
        return {name: _mean_of(name, self._last) for name in STEP_MEANS}


class LinkRates:
    """Bytes per second between each two tasks."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], tuple[Rate, Rate]] = {}

    def add(self, links: Mapping[str, TaskLinks], now_s: float) -> None:
        """Note the bytes that each task tells of; those with tasks that tell nothing themselves are not followed."""
        told = [(task, peer) for task, held in links.items() for peer in held.peers if peer.task in links]
        for task, peer in told if len(told) <= MOST_PAIRS else ():
            out, into = self._pairs.setdefault((task, peer.task), (Rate(), Rate()))
            out.add(peer.out_bytes, now_s)
            into.add(peer.in_bytes, now_s)

    def of(self, task: str, links: TaskLinks) -> TaskLinks:
        """The same per second."""
        found = []
        for peer in links.peers:
            if (task, peer.task) in self._pairs:
                out, into = self._pairs[task, peer.task]
                found.append(PeerBytes(task=peer.task, out_bytes=out.per_second, in_bytes=into.per_second))
        return dataclasses.replace(links, peers=tuple(found))


def _mean_of(name: str, reports: Collection[StepReport]) -> float:
    found = [getattr(report, name) for report in reports]
    return mean([value for value in found if value] if name == "gap" else found)


def mean(values: Collection[float]) -> float:
    """Arithmetic mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


class Shelf:
    """The committed checkpoints still on disk, for display."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Path, int, float]] = {}

    def put(self, step: int, path: Path) -> None:
        """Add a checkpoint, and drop those that retention has deleted."""
        nbytes, written = 0, time.time()
        try:
            files = [file.stat() for file in path.iterdir()]
            nbytes, written = sum(file.st_size for file in files), path.stat().st_mtime
        except OSError as error:
            log.debug("%s can't be measured: %s", path, error)
        self._found[step] = (path, nbytes, written)
        self._found = {step: item for step, item in self._found.items() if item[0].is_dir()}

    def list(self, now: float) -> tuple[CheckpointStatus, ...]:
        """All of them, ascending by step. now: Unix time in seconds."""
        return tuple(
            CheckpointStatus(step=step, path=str(path), bytes=nbytes, age_s=max(0.0, now - written))
            for step, (path, nbytes, written) in sorted(self._found.items())
        )


class Reporter:
    """Files under out/logs, metrics, and the figures of `shardline status`. Used by the control thread."""

    def __init__(
        self,
        folder: Path,
        metrics: Metrics,
        history: History | None = None,
        passes: Passes | None = None,
        *,
        trackers: Sequence[str] = (),
    ) -> None:
        """history: curves to fill; they start with what the files in the folder contain of this run.

        trackers: services that show the run's curves, too; see shardline_chief.io.trackers.
        """
        self._folder = folder
        self._metrics = metrics
        self._files: dict[str, TextIO] = {}
        self._broken = False
        self.failure = ""
        """Why the logs can't be written now; empty if they can."""
        self._board: Any = None
        self._trackers = Trackers(trackers)
        self.steps: StepBoard | None = None
        self.said: deque[EventStatus] = deque(maxlen=EVENTS_SHOWN)
        self._drawn = recall(history, folder) if history is not None else None
        """Timeline of the curves; None before the first."""
        self.history = history or History()
        self.passes = passes or new_passes()
        """Of a pipeline."""
        self._next_rates_s = -math.inf
        self.shelf = Shelf()
        self._held = HeldReports()
        self._reached = 0.0
        self._joined = True
        self._written: set[tuple[int, str]] = set()
        """Steps already in the log, written by an earlier chief: (step, task)."""
        self.loss = math.nan
        self.step_rate = Rate()
        self.byte_rate = Rate()
        self.push_rate, self.pull_rate = Rate(), Rate()
        self.task_rates: dict[str, tuple[Rate, Rate]] = {}
        self.links = LinkRates()
        self.paces: dict[str, TaskSpeed] = {}
        self._timeline = 0
        self._staleness = deque[float](maxlen=STALENESS)

    @property
    def staleness(self) -> float:
        """Mean staleness of the recent steps, in versions."""
        return mean(self._staleness)

    # Events

    @for_people
    def event(self, kind: str, sentence: str, level: str, fields: Mapping[str, Any]) -> None:
        """Log one event. level: "info", "warning" or "error"."""
        sentence = sentence[:SENTENCE]
        now = datetime.now(UTC)
        self.said.append(EventStatus(time=now.timestamp(), level=level, sentence=sentence))
        log.log(LEVELS[level], "%s", sentence)
        stamp = now.isoformat(timespec="milliseconds")
        self._write("events", {"time": stamp, "kind": kind, "level": level, "message": sentence, **fields})
        self._flush("events")

    # Steps

    @for_people
    def begin(self, *, replicas: int, joined: bool, timeline: int, first_step: int, job: JobSpec | None = None) -> None:
        """A timeline begins to train at first_step: remove what TensorBoard and the curves have beyond it."""
        self.steps = StepBoard(replicas, joined=joined)
        if self._timeline:
            self._held.forget()
        self._joined, self._written = joined, _lines(self._folder / "steps.jsonl", timeline, joined=joined)
        self._timeline = timeline
        if timeline != self._drawn:
            # A chief that took over a running cluster continues the timeline of the previous one, wherever it began.
            self._drawn = timeline
            self.history.forget(first_step)
        # Don't count the jump from the run's first step to this one as speed.
        self.step_rate = Rate()
        with self._disk():
            # Imported here: it takes a second or two, and is not needed before training.
            from torch.utils.tensorboard import SummaryWriter

            again = self._board is not None
            if self._board is not None:
                self._board.close()
            purge = first_step if again or first_step else None
            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=purge)
        self._trackers.begin(self._folder.parent, job)
        self._take_in()

    @for_people
    def report(self, task: str, reports: Sequence[StepReport], reached: float | None = math.inf) -> None:
        """Take in one task's finished steps.

        reached: the step that the servers are known to have reached; None: as was last told.
        """
        if reports:
            self._held.add(task, reports)
        elif reached is None:
            return
        if reached is not None:
            self._reached = reached
        self._take_in()

    def _take_in(self) -> None:
        # A restarted chief gets reports before it has taken command.
        if self.steps is not None:
            for task, reports in self._held.due(self._reached, joined=self._joined):
                self._steps(task, reports, self.steps)

    def _steps(self, task: str, reports: Sequence[StepReport], board: StepBoard) -> None:
        pace = self.paces.setdefault(task, TaskSpeed())
        for report in reports:
            if (report.step, "" if self._joined else task) in self._written:
                # The previous chief has written it; the task can't know that.
                continue
            pace.add(report)
            self._metrics.counter("shardline_examples_total").inc(report.samples)
            self._metrics.histogram("shardline_step_seconds").observe(
                report.data_s + report.compute_s + report.exchange_s
            )
            for step, group in board.add(report):
                self._step(step, group, task)
        self._flush("steps")

    def _step(self, step: int, group: Sequence[StepReport], task: str) -> None:
        losses = [report.loss for report in group]
        self.loss = sum(losses) / len(losses)
        staleness = sum(report.staleness for report in group) / len(group)
        self._staleness.append(staleness)
        self._metrics.gauge("shardline_loss").set(self.loss)
        line: dict[str, Any] = {
            "timeline": self._timeline,
            "step": step,
            "loss": self.loss,
            "samples": sum(report.samples for report in group),
            "replicas": len(group),
            **{name: max(getattr(report, name) for report in group) for name in SECONDS},
            "staleness": staleness,
            "time": time.time(),
        }
        rare = {name: _mean_of(name, group) for name in MEASURED_RARELY}
        line |= {name: value for name, value in rare.items() if value}
        if len(group) == 1:
            line["task"] = task
        names = dict.fromkeys(name for report in group for name in report.logged)
        logged = {name: mean([report.logged[name] for report in group if name in report.logged]) for name in names}
        if logged:
            line["logged"] = logged
        self._write("steps", line)
        for name, value in logged.items():
            self.history.add(f"logged/{name}", step, value)
            self._scalar(f"train/{name}", value, step)
        self.history.add("loss", step, self.loss)
        self.history.add("staleness", step, staleness)
        self._scalar("train/loss", self.loss, step)
        self._scalar("train/staleness", staleness, step)

    @for_people
    def rates(self, step: int, traffic: Mapping[str, tuple[int, int]], now_s: float) -> None:
        """Note the job's step and each task's wire bytes (pushed, pulled); the totals are those of the ps."""
        if self.steps is not None:
            self.step_rate.add(step, now_s)
        for pace in self.paces.values():
            pace.rate.add(pace.steps, now_s)
        self._metrics.gauge("shardline_step").set(step)
        for task, (pushed, pulled) in traffic.items():
            push, pull = self.task_rates.setdefault(task, (Rate(), Rate()))
            push.add(pushed, now_s)
            pull.add(pulled, now_s)
        through = [both for task, both in traffic.items() if task.startswith("ps/")]
        pushed, pulled = sum(push for push, _ in through), sum(pull for _, pull in through)
        self.push_rate.add(pushed, now_s)
        self.pull_rate.add(pulled, now_s)
        self.byte_rate.add(pushed + pulled, now_s)
        line = {
            "time": time.time(),
            "timeline": self._timeline,
            "step": step,
            "steps_per_s": self.step_rate.per_second,
            "push_bytes_per_s": self.push_rate.per_second,
            "pull_bytes_per_s": self.pull_rate.per_second,
        }
        add_rates(self.history, line["time"], line)
        if now_s >= self._next_rates_s:
            self._next_rates_s = now_s + RATES_EVERY_S
            self._write("rates", line)
            self._flush("rates")
        self._scalar("train/steps_per_second", self.step_rate.per_second, step)
        self._scalar("traffic/bytes_per_second", self.byte_rate.per_second, step)
        self._tell_problems()

    @for_people
    def stages(self) -> None:
        for one in self.passes.figures():
            self._metrics.gauge("shardline_pipeline_bubble_ratio", stage=str(one.stage)).set(one.bubble)
            self._metrics.gauge("shardline_stage_held_microbatches", stage=str(one.stage)).set(one.held)
            for way, seconds in (("forward", one.forward_s), ("backward", one.backward_s)):
                self._metrics.gauge("shardline_stage_pass_seconds", stage=str(one.stage), way=way).set(seconds)

    @for_people
    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics.gauge("shardline_evaluation_metric", metric=name).set(value)
            self.history.add(f"evaluation/{name}", step, value)
            self._scalar(f"evaluation/{name}", value, step)

    @for_people
    def checkpoint(self, step: int, seconds: float, nbytes: int, *, failed: bool) -> None:
        """Note a checkpoint that was committed, or could not be written."""
        self._metrics.counter("shardline_checkpoints_total", outcome="failed" if failed else "written").inc()
        if failed:
            return
        self._metrics.histogram("shardline_checkpoint_seconds").observe(seconds)
        self._metrics.gauge("shardline_checkpoint_bytes").set(nbytes)
        self._metrics.gauge("shardline_checkpoint_step").set(step)
        self._scalar("checkpoint/seconds", seconds, step)

    # Files

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._trackers.put(name, value, step)
        if self._board is None:
            return
        try:
            self._board.add_scalar(name, value, step)
        except OSError as error:
            # The writer's background thread has ended with this error.
            self._board = None
            self._fail(error)

    def _write(self, name: str, fields: Mapping[str, Any]) -> None:
        with self._disk():
            if name not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._files[name] = _append(self._folder / f"{name}.jsonl")
            self._files[name].write(to_line(fields) + "\n")

    def _flush(self, name: str) -> None:
        with self._disk():
            if name in self._files:
                self._files[name].flush()
                self.failure = ""

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """Within it, a disk that fails costs the logs alone."""
        try:
            yield
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        why = error.strerror or error
        self.failure = f"logs under {self._folder} can't be written ({why}); training continues without them"
        if not self._broken:
            self._broken = True
            self.event("logs_failed", self.failure, "error", {})

    @for_people
    def close(self) -> None:
        for task, count in sorted(self._held.end().items()):
            sentence = f"{task}: {count} reports of steps that no server had reached are not in the logs"
            self.event("steps_dropped", sentence, "warning", {"task": task})
        for step, group in self.steps.rest() if self.steps is not None else []:
            self._step(step, group, "")
        self._trackers.close()
        self._tell_problems()
        for name, file in self._files.items():
            self._flush(name)
            with self._disk():
                file.close()
        self._files.clear()
        # A pipeline's passes. A chief that took over and saw none leaves what is there.
        if (found := self.passes.trace()) is not None and found["traceEvents"]:
            with self._disk():
                files.replace(self._folder.parent / TRACE, json.dumps(found, separators=(",", ":")).encode())
        if self._board is not None:
            with self._disk():
                self._board.close()
            self._board = None

    def _tell_problems(self) -> None:
        for name, problem in self._trackers.problems():
            self.event("tracker_failed", problem, "warning", {"tracker": name})


def _lines(steps: Path, timeline: int, *, joined: bool) -> set[tuple[int, str]]:
    """(step, task) of the newest lines of this timeline, if an earlier chief wrote some; task is "" if joined."""
    try:
        with files.open_binary(steps) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return set()
    found = set()
    for text in lines:
        # The first line may be cut off at its start, and any line by a crash.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            if line["timeline"] == timeline:
                found.add((int(line["step"]), "" if joined else str(line["task"])))
    return found


def _append(path: Path) -> TextIO:
    """Open for appending; a line cut short by an earlier chief's crash stays a line of its own."""
    torn = False
    with contextlib.suppress(FileNotFoundError), files.open_binary(path) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
    found = files.open_append(path)
    if torn:
        found.write("\n")
    return found
