"""One frame of `shardline top`: a cluster view as rich renderables. Pure: no clock, socket or terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardline.host.printable import printable
from shardline.observability.counting import position, speed
from shardline.observability.view import ClusterView, EventView, ShardView, StandstillView, TaskView, codec_text

POINTS = 240
"""Most points of a curve; older ones are dropped."""
METRICS = 3
"""Most evaluation metrics with a line of their own."""
EVENTS = 5
FEWEST_ROWS = 3
"""Fewest rows of a table, however low the terminal."""
MIN_WIDTH = 40
STYLES = {"alive": "green", "suspect": "yellow", "missing": "yellow", "dead": "bold red", "left": "dim"}
LEVELS = {"error": "bold red", "warning": "yellow"}


@dataclass(frozen=True)
class Glyphs:
    """The characters that figures are drawn with."""

    steps: str
    full: str
    empty: str
    none: str
    between: str
    more: str


FANCY = Glyphs(steps="▁▂▃▄▅▆▇█", full="━", empty="╌", none="–", between=" · ", more="…")
ASCII = Glyphs(steps="_.-=+*#@", full="#", empty=".", none="-", between=", ", more="...")


@dataclass(frozen=True, kw_only=True)
class ChiefSilence:
    """The chief does not answer."""

    since: float
    """Unix time of the first unanswered request."""
    now: float
    until: float
    """Unix time at which it is given up."""
    reason: str


class Curves:
    """Loss and evaluation metrics that this terminal has seen so far."""

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._curves: dict[str, deque[tuple[int, float]]] = {}

    def add(self, view: ClusterView) -> None:
        """Add a view's newest points; a step that was seen before, or that the job was rolled back to, is not new."""
        if view.loss is not None and view.step > view.first_step:
            self._put("loss", view.step, view.loss)
        if view.evaluation is not None:
            for name, value in view.evaluation.metrics.items():
                self._put(f"evaluated {name}", view.evaluation.step, value)

    def _put(self, name: str, step: int, value: float) -> None:
        curve = self._curves.setdefault(name, deque(maxlen=self._points))
        if value == value and abs(value) != float("inf") and (not curve or step > curve[-1][0]):
            curve.append((step, value))

    def values(self, name: str) -> list[float]:
        """Values of a curve, oldest first."""
        return [value for _, value in self._curves.get(name, ())]


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs = FANCY) -> str:
    """Values as a row of at most `width` blocks; values that share a block are averaged."""
    if not values or width < 1:
        return ""
    size = -(-len(values) // width)
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(means), max(means)
    most = len(glyphs.steps) - 1
    return "".join(glyphs.steps[round((value - low) / (high - low) * most) if high > low else 0] for value in means)


def bar(share: float, width: int, glyphs: Glyphs = FANCY) -> str:
    """A bar of `width` characters, filled to a share from 0 to 1."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return glyphs.full * filled + glyphs.empty * (width - filled)


def seconds(value: float) -> str:
    """A duration: "0.4 s", "12 s", "3 min", "2 h 05 min"."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"


def size(value: float) -> str:
    """Bytes with a decimal prefix: "3.4 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix))


def plain_line(view: ClusterView) -> str:
    """A frame as one line, if the output is not a terminal: "12:30:05 digits training step 120/400 loss 0.31 ..."."""
    parts = [clock(view.time), printable(view.job) or "job", printable(view.doing), _steps(view)]
    if view.loss is not None and view.step > view.first_step:
        parts.append(f"loss {view.loss:.4f}")
    if view.steps_per_s > 0:
        parts.append(speed(view.counting, f"{view.steps_per_s:.1f}"))
        parts.append(f"push {size(view.push_bytes_per_s)}/s")
        parts.append(f"pull {size(view.pull_bytes_per_s)}/s")
    if view.evaluation is not None:
        found = ", ".join(f"{printable(name)} {value:.4g}" for name, value in view.evaluation.metrics.items())
        parts.append(f"evaluated at step {view.evaluation.step}: {found}")
    if view.left_s is not None:
        parts.append(f"{seconds(view.left_s)} left")
    ill = [f"{task.name} {task.state}" for task in view.tasks if task.state in ("suspect", "dead", "missing")]
    return "  ".join([*parts, *ill])


def plain_event(event: EventView) -> str:
    mark = "" if event.level == "info" else f" {event.level.upper()}"
    return f"{clock(event.time)}{mark} {printable(event.sentence)}"


def silence_text(silence: ChiefSilence, address: str) -> str:
    """How long the chief has been silent, and for how long it is still polled."""
    ago = seconds(max(0.0, silence.now - silence.since))
    return (
        f"no answer from the chief at {address} since {clock(silence.since)} ({ago}); retrying until "
        f"{clock(silence.until)}"
    )


def standstill_text(found: StandstillView) -> str:
    """Since when the job has not moved, and for whom it waits."""
    whom = f": waiting for {found.facts}" if found.facts else ""
    return f"no step since {clock(found.since)} ({seconds(found.seconds)}){whom}"


def frame(
    view: ClusterView,
    curves: Curves,
    *,
    width: int,
    height: int | None = None,
    silence: ChiefSilence | None = None,
    address: str = "",
    glyphs: Glyphs = FANCY,
) -> RenderableType:
    """The cluster view for a terminal of `width` columns and `height` lines (None: no limit)."""
    width = max(MIN_WIDTH, width)
    head = [*_head(view, curves, width, glyphs), *_stages(view, width)]
    if silence is not None:
        head = [Text(printable(silence_text(silence, address)), style="bold red", overflow="fold"), *head]
    tail = [_events(view.events[-EVENTS:], width, glyphs)] if view.events else []
    # Blank lines and headings: one of each for both tables, one blank line before the events.
    left = None if height is None else height - len(head) - (2 if len(view.shards) else 0) - 2 - _lines(view, EVENTS)
    tasks, shards = _share(left, len(view.tasks), len(view.shards))
    parts: list[RenderableType] = [*head, Text(), _tasks(view.tasks, tasks, width, glyphs)]
    if view.shards:
        parts += [Text(), _shards(view, shards, width, glyphs)]
    if tail:
        parts += [Text(), *tail]
    return Group(*parts)


def waiting(silence: ChiefSilence, address: str) -> RenderableType:
    """What to show before the first answer."""
    return Group(
        Text(printable(silence_text(silence, address)), style="bold", overflow="fold"),
        Text(printable(silence.reason), style="dim", overflow="fold"),
    )


def _lines(view: ClusterView, most: int) -> int:
    return min(len(view.events), most) + 1 if view.events else 0


def _share(left: int | None, tasks: int, shards: int) -> tuple[int, int]:
    """Rows for tasks and for shards; each gets FEWEST_ROWS at least, and tasks come first."""
    if left is None or tasks + shards <= left:
        return tasks, shards
    for_shards = min(shards, max(FEWEST_ROWS, left - tasks))
    return min(tasks, max(FEWEST_ROWS, left - for_shards)), for_shards


def _steps(view: ClusterView) -> str:
    return position(view.counting, view.step, view.done, view.steps or 0)


def _head(view: ClusterView, curves: Curves, width: int, glyphs: Glyphs) -> Iterable[Text]:
    replicas = f"{view.replicas} replicas" if view.replicas else ""
    facts = [view.mode, view.rule, replicas, *map(codec_text, view.codecs)]
    title = Text(overflow="ellipsis", no_wrap=True)
    title.append(printable(view.job) or "job", style="bold")
    title.append(glyphs.between.join(["", *(fact for fact in map(printable, facts) if fact)]), style="dim")
    title.append(glyphs.between)
    moves = view.phase == "running" and view.standstill is None
    title.append(printable(view.doing), style="bold green" if moves else "bold yellow")
    yield title
    if view.standstill is not None:
        yield Text(printable(standstill_text(view.standstill)), style="bold yellow", overflow="fold")
    yield _progress(view, width, glyphs)
    figures = [
        speed(view.counting, f"{view.steps_per_s:.1f}" if view.standstill is None else glyphs.none),
        f"push {size(view.push_bytes_per_s)}/s",
        f"pull {size(view.pull_bytes_per_s)}/s",
    ]
    if view.staleness is not None and view.staleness_max:
        figures.append(f"staleness {view.staleness:.1f} (at most {view.staleness_max})")
    yield _one_line("  ".join(figures))
    if view.loss is not None and view.step > view.first_step:
        yield _curve("loss", f"{view.loss:.4f}", curves.values("loss"), width, glyphs)
    if view.evaluation is not None:
        for name, value in list(view.evaluation.metrics.items())[:METRICS]:
            at = f"{value:.4g} at step {view.evaluation.step}"
            if view.best is not None and name in view.best.metrics:
                at += f", best step {view.best.step}"
            yield _curve(f"evaluated {printable(name)}", at, curves.values(f"evaluated {name}"), width, glyphs)
    if view.checkpoints:
        newest = view.checkpoints[0]
        when = f"{seconds(newest.age_s)} ago"
        yield _one_line(f"checkpoint of step {newest.step}, {when}, {size(newest.bytes)}, {printable(newest.path)}")
    for fault in view.faults:
        yield Text(printable(fault), style="bold red", overflow="fold")
    if view.reason and view.phase in ("stopping", "ended"):
        yield Text(printable(view.reason), style="bold" if view.exit_code == 0 else "bold red", overflow="fold")


def _stages(view: ClusterView, width: int) -> Iterable[Text]:
    """A pipeline's stages, one line each."""
    for stage in view.stages:
        told = f"stage {stage.stage}: {stage.bubble:.0%} idle within steps, holds {stage.held}"
        told += f", {stage.behind} updates behind" if stage.behind else ""
        told += f", {stage.versions} versions" if stage.versions > 1 else ""
        if width >= 80:
            told += f", forward {1000 * stage.forward_s:.1f} ms, backward {1000 * stage.backward_s:.1f} ms"
        yield _one_line(f"{told}, on {', '.join(map(printable, stage.tasks))}")


def _one_line(text: str) -> Text:
    return Text(text, overflow="ellipsis", no_wrap=True)


def _progress(view: ClusterView, width: int, glyphs: Glyphs) -> Text:
    words = _steps(view)
    if view.progress is not None:
        words += f"  {view.progress:.0%}"
    if view.left_s is not None:
        words += f"  {seconds(view.left_s)} left"
    elif view.seconds > 0:
        words += f"  {seconds(view.seconds)}"
    line = Text(overflow="ellipsis", no_wrap=True)
    if view.progress is not None:
        line.append(bar(view.progress, max(8, min(60, width - len(words) - 2)), glyphs), style="green")
        line.append("  ")
    line.append(words)
    return line


def _curve(name: str, figure: str, values: Sequence[float], width: int, glyphs: Glyphs) -> Text:
    line = _one_line(f"{name} {figure}")
    room = width - line.cell_len - 2
    if len(values) > 1 and room >= 8:
        line.append("  ")
        line.append(sparkline(values, min(room, 60), glyphs), style="cyan")
    return line


Justify = Literal["left", "right"]
Column = tuple[str, Justify, int, Callable[[TaskView, Glyphs], Text | str]]
"""Heading, justification, narrowest terminal that shows it, cell of a task."""


def _rate(value: float, glyphs: Glyphs) -> str:
    return f"{size(value)}/s" if value > 0 else glyphs.none


def _milliseconds(value: float | None, glyphs: Glyphs) -> str:
    return f"{value * 1000:.0f} ms" if value is not None else glyphs.none


COLUMNS: Sequence[Column] = (
    ("task", "left", 0, lambda task, glyphs: task.name),
    ("state", "left", 0, lambda task, glyphs: Text(printable(task.state), style=STYLES.get(task.state, ""))),
    ("life", "left", 60, lambda task, glyphs: task.incarnation or glyphs.none),
    ("heard", "right", 0, lambda task, glyphs: glyphs.none if task.heard_s is None else seconds(task.heard_s)),
    ("step", "right", 0, lambda task, glyphs: glyphs.none if task.step is None else str(task.step)),
    ("push", "right", 60, lambda task, glyphs: _rate(task.push_bytes_per_s, glyphs)),
    ("pull", "right", 60, lambda task, glyphs: _rate(task.pull_bytes_per_s, glyphs)),
    ("steps/s", "right", 80, lambda task, glyphs: f"{task.steps_per_s:.1f}" if task.steps_per_s > 0 else glyphs.none),
    ("stale", "right", 80, lambda task, glyphs: glyphs.none if task.staleness is None else f"{task.staleness:.1f}"),
    ("gap", "right", 140, lambda task, glyphs: glyphs.none if task.gap is None else f"{task.gap:.1e}"),
    ("data", "right", 100, lambda task, glyphs: _milliseconds(task.data_s, glyphs)),
    ("compute", "right", 100, lambda task, glyphs: _milliseconds(task.compute_s, glyphs)),
    ("exchange", "right", 100, lambda task, glyphs: _milliseconds(task.exchange_s, glyphs)),
    ("blocked", "right", 120, lambda task, glyphs: _milliseconds(task.blocked_s, glyphs)),
    ("device", "left", 120, lambda task, glyphs: printable(task.device) or glyphs.none),
    ("address", "left", 120, lambda task, glyphs: printable(task.address)),
)


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")


def _tasks(tasks: Sequence[TaskView], rows: int, width: int, glyphs: Glyphs) -> Table:
    table = _table()
    columns = [column for column in COLUMNS if width >= column[2]]
    for name, justify, _, _ in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    # If there isn't room for all, tasks that need attention come first; the others keep their order.
    shown = tasks if rows >= len(tasks) else sorted(tasks, key=lambda task: task.state == "alive")[: rows - 1]
    for task in shown:
        table.add_row(*(cell(task, glyphs) for _, _, _, cell in columns))
    if len(shown) < len(tasks):
        table.add_row(f"{glyphs.more} {len(tasks) - len(shown)} more")
    return table


def _shards(view: ClusterView, rows: int, width: int, glyphs: Glyphs) -> Table:
    table = _table()
    wide = width >= 80
    # Most jobs have no standbys, and the space has better uses.
    standbys = wide and any(shard.standby for shard in view.shards)
    length = 24 if width >= 120 else 6 if standbys else 12
    more = (*(("standby",) if standbys else ()), "memory", "awaits") if wide else ()
    for name in ("shard", "on", "size", "", "version", "steps", *more):
        table.add_column(name, justify="right" if name in ("shard", "size", "version", "steps", "memory") else "left")
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    shown = view.shards if rows >= len(view.shards) else view.shards[: rows - 1]
    for shard in shown:
        steps = str(shard.step_min) if shard.step_min == shard.step_max else f"{shard.step_min}-{shard.step_max}"
        row: list[Text | str] = [
            str(shard.shard),
            Text(printable(shard.ps), style=STYLES.get(shard.state, "")),
            size(shard.bytes),
            Text(bar(shard.share, length, glyphs), style="cyan"),
            str(shard.version),
            steps,
        ]
        if standbys:
            row.append(_standby(shard))
        if wide:
            row += [glyphs.none if shard.held_bytes is None else size(shard.held_bytes), _awaited(shard)]
        table.add_row(*row)
    if len(shown) < len(view.shards):
        table.add_row("", f"{glyphs.more} {len(view.shards) - len(shown)} more")
    return table


def _standby(shard: ShardView) -> Text:
    words = f"{shard.standby} {shard.standby_state}".strip()
    return Text(printable(words), style="" if shard.standby_state == "in step" else "yellow")


def _awaited(shard: ShardView) -> str:
    return f"replica {', '.join(str(replica) for replica in shard.waiting_for)}" if shard.waiting_for else ""


def _events(events: Sequence[EventView], width: int, glyphs: Glyphs) -> RenderableType:
    lines = []
    for event in events:
        line = Text(overflow="ellipsis", no_wrap=True)
        line.append(clock(event.time), style="dim")
        line.append(f" {printable(event.sentence)}", style=LEVELS.get(event.level, ""))
        # Cut here: rich would cut with a character that ASCII terminals lack.
        if line.cell_len > width:
            line.truncate(width - len(glyphs.more), overflow="crop")
            line.append(glyphs.more)
        lines.append(line)
    return Group(*lines)
