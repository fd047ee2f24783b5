"""One frame of `shardline status`: a cluster view as text of any width and height. Pure: no clock or socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardline.cli.progress import duration
from shardline.core.status import EventStatus
from shardline.host.printable import printable
from shardline.observability.counting import position, speed
from shardline.observability.view import ClusterView, ShardView, TaskView, codec_text

T = TypeVar("T")
EVENTS = 5
FEWEST_ROWS = 3
"""Fewest rows of a table, however low the terminal."""
ILL = ("suspect", "missing", "dead")
STYLES = {"alive": "green", "suspect": "yellow", "missing": "yellow", "dead": "bold red", "left": "dim"}
LEVELS = {"error": "bold red", "warning": "yellow"}

Column = tuple[str, JustifyMethod, int, Callable[[T], RenderableType]]
"""Heading, justification, narrowest terminal that shows it, cell of a row; "" = unknown."""


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s" if value < 10 else duration(value)


def clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix))


def event_line(event: EventStatus) -> str:
    mark = "" if event.level == "info" else f" {event.level.upper()}"
    return f"{clock(event.time)}{mark} {event.sentence}"


def _size(value: float | None) -> str:
    return "" if value is None else decimal(round(value))


def _rate(value: float) -> str:
    return f"{_size(value)}/s" if value > 0 else ""


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1000:.0f} ms"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


TASKS: Sequence[Column[TaskView]] = (
    ("task", "left", 0, lambda task: task.name),
    ("state", "left", 0, lambda task: Text(printable(task.state), STYLES.get(task.state, ""))),
    ("life", "left", 60, lambda task: task.incarnation),
    ("heard", "right", 0, lambda task: seconds(task.heard_s)),
    ("step", "right", 0, lambda task: "" if task.step is None else str(task.step)),
    ("push", "right", 60, lambda task: _rate(task.push_bytes_per_s)),
    ("pull", "right", 60, lambda task: _rate(task.pull_bytes_per_s)),
    ("steps/s", "right", 80, lambda task: f"{task.steps_per_s:.1f}" if task.steps_per_s > 0 else ""),
    ("stale", "right", 80, lambda task: "" if task.staleness is None else f"{task.staleness:.1f}"),
    ("gap", "right", 140, lambda task: "" if task.gap is None else f"{task.gap:.1e}"),
    ("data", "right", 100, lambda task: _milliseconds(task.data_s)),
    ("compute", "right", 100, lambda task: _milliseconds(task.compute_s)),
    ("exchange", "right", 100, lambda task: _milliseconds(task.exchange_s)),
    ("blocked", "right", 120, lambda task: _milliseconds(task.blocked_s)),
    ("cpu", "right", 100, lambda task: _percent(task.cores)),
    ("memory", "right", 100, lambda task: _size(task.resident_bytes)),
    ("gpu", "right", 120, lambda task: _percent(task.gpu_share)),
    ("gpu memory", "right", 120, lambda task: _size(task.gpu_bytes)),
    ("device", "left", 120, lambda task: task.device),
    ("address", "left", 120, lambda task: task.address),
    ("metrics", "left", 160, lambda task: task.metrics_address),
)
SHARDS: Sequence[Column[ShardView]] = (
    ("shard", "right", 0, lambda shard: str(shard.shard)),
    ("on", "left", 0, lambda shard: Text(printable(shard.ps), STYLES.get(shard.state, ""))),
    ("size", "right", 0, lambda shard: _size(shard.bytes)),
    ("", "left", 100, lambda shard: ProgressBar(1.0, shard.share, width=12)),
    ("version", "right", 0, lambda shard: str(shard.version)),
    ("steps", "right", 0, lambda shard: "-".join(map(str, sorted({shard.step_min, shard.step_max})))),
    ("standby", "left", 80, lambda shard: f"{shard.standby} {shard.standby_state}" if shard.standby else ""),
    ("memory", "right", 80, lambda shard: _size(shard.held_bytes)),
    ("awaits", "left", 80, lambda shard: f"replica {', '.join(map(str, shard.waiting_for))}" * bool(shard.waiting_for)),
)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The cluster for a terminal of `height` lines (None: no limit) and any width."""

    view: ClusterView | None
    """None before the first answer."""
    silence: str = ""
    """Since when the chief has not answered."""
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, width = self.view, options.max_width
        if self.silence:
            yield _folded(self.silence, "bold red")
        if view is None:
            return
        head = [*_head(view, width), *_stages(view)]
        events = [_cut(event_line(event), LEVELS.get(event.level, "")) for event in view.events[-EVENTS:]]
        tasks = sorted(view.tasks, key=lambda task: task.state not in ILL)
        # Beside the rows there are headings, blank lines and the silence.
        rows = (self.height or 1_000_000) - len(head) - len(events) - 6
        shards = min(len(view.shards), max(FEWEST_ROWS, rows - len(tasks)))
        yield from head
        yield ""
        yield from _table(TASKS, tasks, max(FEWEST_ROWS, rows - shards), width)
        if view.shards:
            yield ""
            yield from _table(SHARDS, view.shards, shards, width)
        if events:
            yield ""
            yield from events


def _cut(text: str, style: str = "") -> Text:
    """One line, cut at the edge of the terminal."""
    return Text(printable(text), style, overflow="ellipsis", no_wrap=True)


def _folded(text: str, style: str) -> Text:
    return Text(printable(text), style, overflow="fold")


def _head(view: ClusterView, width: int) -> Iterator[RenderableType]:
    replicas = f"{view.replicas} replicas" if view.replicas else ""
    facts = (view.mode, view.rule, replicas, *map(codec_text, view.codecs))
    moves = view.phase == "running" and view.standstill is None
    title = _cut(view.job or "job", "bold")
    title.append("".join(f"  {printable(fact)}" for fact in facts if fact), "not bold dim")
    yield title.append(f"  {printable(view.doing)}", "green" if moves else "yellow")
    if (still := view.standstill) is not None:
        whom = f": waiting for {still.facts}" if still.facts else ""
        yield _folded(f"no step since {clock(still.since)} ({seconds(still.seconds)}){whom}", "bold yellow")
    yield _progress(view, width)
    figures = []
    if view.loss is not None and view.step > view.first_step:
        figures.append(f"loss {view.loss:.4f}")
    if view.steps_per_s > 0:
        figures.append(speed(view.counting, f"{view.steps_per_s:.1f}"))
        figures.append(f"push {_size(view.push_bytes_per_s)}/s  pull {_size(view.pull_bytes_per_s)}/s")
    if view.staleness is not None and view.staleness_max:
        figures.append(f"staleness {view.staleness:.1f} (at most {view.staleness_max})")
    if figures:
        yield _cut("  ".join(figures))
    if view.topology is not None and view.topology.marked:
        yield _cut(view.topology.marked)
    for name, score in (("evaluated", view.evaluation), ("best", view.best)):
        if score is not None:
            metrics = ", ".join(f"{metric} {value:.4g}" for metric, value in sorted(score.metrics.items()))
            yield _cut(f"{name} at step {score.step}: {metrics}")
    for newest in view.checkpoints[:1]:
        yield _cut(
            f"checkpoint of step {newest.step}, {seconds(newest.age_s)} ago, {_size(newest.bytes)}, {newest.path}"
        )
    for fault in view.faults:
        yield _folded(fault, "bold red")
    if view.reason and view.phase in ("stopping", "ended"):
        yield _folded(view.reason, "bold" if view.exit_code == 0 else "bold red")


def _progress(view: ClusterView, width: int) -> RenderableType:
    words = position(view.counting, view.step, view.done, view.steps or 0)
    words += f"  {view.progress:.0%}" if view.progress is not None else ""
    words += f"  {seconds(view.seconds)}" if view.left_s is None else f"  {seconds(view.left_s)} left"
    line = Table.grid(padding=(0, 2, 0, 0))
    room = max(8, min(60, width - len(words) - 2))
    line.add_row(_cut(words), "" if view.progress is None else ProgressBar(1.0, view.progress, width=room))
    return line


def _stages(view: ClusterView) -> Iterator[Text]:
    for stage in view.stages:
        told = f"stage {stage.stage}: {stage.bubble:.0%} idle within steps, holds {stage.held}"
        told += f", {stage.behind} updates behind" if stage.behind else ""
        told += f", {stage.versions} versions" if stage.versions > 1 else ""
        told += f", on {', '.join(stage.tasks)}"
        yield _cut(f"{told}, forward {1000 * stage.forward_s:.1f} ms, backward {1000 * stage.backward_s:.1f} ms")


def _table(columns: Sequence[Column[T]], items: Sequence[T], rows: int, width: int) -> Iterator[RenderableType]:
    """A table of at most `rows` rows, without columns that have no value in any of them."""
    shown = items if len(items) <= rows else items[: rows - 1]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    found = []
    for heading, justify, narrowest, cell in columns:
        cells = [cell(item) for item in shown]
        if width >= narrowest and any(cells):
            table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")
            found.append(cells)
    for row in zip(*found, strict=True):
        table.add_row(*(cell or "-" for cell in row))
    yield table
    if len(shown) < len(items):
        yield _cut(f"... {len(items) - len(shown)} more", "dim")
