"""The display of a running `shardline train`: a progress bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import abc
import contextlib
import math
import time
from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shardline.cli.terminal import PlainConsole
from shardline.core.status import ChiefStatus
from shardline.host.printable import printable
from shardline.observability.counting import position, speed
from shardline.observability.view import doing, done, left_s

LINE_EVERY_S = 3.0
MIN_BAR, MAX_BAR = 8, 24
OTHER_COLUMNS = 72
"""Characters beside the bar, so that 80 columns show every figure in full."""


def waiting_text(status: ChiefStatus) -> str:
    """The job's phase while it takes no steps, such as "waiting for ps/1"; empty while it trains."""
    return "" if status.phase == "running" and status.standstill is None else doing(status)


def scores(status: ChiefStatus) -> str:
    """The last evaluation, labelled so that it can't be mistaken for the training loss, which may have the same name.

    Includes its step: an evaluation lags behind, and that of step 0 scores an untrained model.
    """
    found = ", ".join(f"{name} {value:.4g}" for name, value in sorted(status.last_metrics.items()))
    return f"evaluated at step {status.last_metrics_step}: {found}" if found else ""


def figures(status: ChiefStatus) -> str:
    """Loss, speed and skipped steps as a short text, without unknown values."""
    parts = []
    if math.isfinite(status.loss) and status.step > status.first_step:
        parts.append(f"loss {status.loss:.4f}")
    if status.steps_per_s > 0:
        parts.append(speed(status.counting, f"{status.steps_per_s:.1f}"))
        parts.append(f"{status.bytes_per_s / 1e6:.1f} MB/s")
    skipped = max((shard.skipped_steps for task in status.tasks for shard in task.shards), default=0)
    if skipped:
        parts.append(f"{skipped} skipped")
    return "  ".join(parts)


def line(status: ChiefStatus) -> str:
    """One line such as "step 120/400  loss 0.3100  52.1 steps/s  3.4 MB/s  ETA 5 s"."""
    where = position(status.counting, status.step, done(status), status.steps)
    parts = [where, figures(status), scores(status), waiting_text(status)]
    return "  ".join(part for part in [*parts, eta(status)] if part)


def eta(status: ChiefStatus) -> str:
    """The time left, such as "ETA 5 s"; empty if it is unknown."""
    return f"ETA {duration(left)}" if (left := left_s(status)) else ""


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Display(contextlib.AbstractContextManager["Display"]):
    def __init__(self, console: PlainConsole) -> None:
        self._console = console

    @abc.abstractmethod
    def update(self, status: ChiefStatus) -> None:
        """Show the newest status."""

    def say(self, sentence: str) -> None:
        """Print a permanent line."""
        self._console.say(sentence)


class LineDisplay(Display):
    """Plain lines, at most one in LINE_EVERY_S seconds, and one at the end."""

    def __init__(self, console: PlainConsole, *, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._now_s = now_s
        self._next_s = 0.0
        self._pending: str | None = None

    def update(self, status: ChiefStatus) -> None:
        """Print the status if the last line is old enough, else keep it for the end."""
        text = line(status)
        if self._now_s() < self._next_s:
            self._pending = text
            return
        self._next_s = self._now_s() + LINE_EVERY_S
        self._pending = None
        self.say(text)

    def __exit__(self, *error: object) -> None:
        if self._pending is not None:
            self.say(self._pending)
            self._pending = None


class BarDisplay(Display):
    """A progress bar that is redrawn in place; evaluations, which are too long for it, are printed above."""

    def __init__(self, console: PlainConsole) -> None:
        super().__init__(console)
        self._scores = ""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=max(MIN_BAR, min(MAX_BAR, console.width - OTHER_COLUMNS))),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("{task.fields[eta]}", markup=False),
            console=console,
        )
        self._bar = self._progress.add_task("starting", total=None, figures="", eta="")

    def update(self, status: ChiefStatus) -> None:
        found = scores(status)
        if found not in ("", self._scores):
            self._scores = found
            self.say(found)
        self._progress.update(
            self._bar,
            description=printable(waiting_text(status)) or status.counting.asked,
            completed=done(status),
            total=status.steps or None,
            figures=figures(status),
            eta=eta(status),
        )

    def __enter__(self) -> BarDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def on_terminal(console: PlainConsole) -> bool:
    """Whether the console's output can be redrawn in place.

    With FORCE_COLOR, as set for build logs, rich colours a pipe; a pipe can't be redrawn all the same.
    """
    return console.file.isatty() and not console.is_dumb_terminal


def make_display(console: PlainConsole) -> Display:
    return BarDisplay(console) if on_terminal(console) else LineDisplay(console)
