"""Output of tasks, on its way to their logs and to the launcher's terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardline.cli.terminal import PlainConsole

NONE, FIRST, ALL = "none", "first", "all"
CHOICES = (FIRST, ALL, NONE)
PIPE_BYTES = 1 << 20
"""A launcher that is paused doesn't stop a task before it has printed this much, where the system allows it."""
LINE_BYTES = 1 << 16
"""Longer lines are shown in pieces."""
F_SETPIPE_SZ = 1031
"""Of Linux; the module fcntl doesn't have it everywhere."""


def shown(chosen: str, tasks: Sequence[str]) -> Sequence[str]:
    """The tasks whose prints are shown, of all of the cluster; without workers the first is the chief, which trains."""
    workers = [task for task in tasks if task.startswith("worker/")] or ["chief/0"]
    return {NONE: (), FIRST: workers[:1], ALL: tasks}[chosen]


class Printed:
    """A task's standard output: its log, or a pipe whose lines a thread copies to the log and hands to `show`.

    As a context it closes the launcher's end for writing, once the task has it.
    """

    def __init__(self, log: int, show: Callable[[str], None] | None) -> None:
        self.fd = log
        """The descriptor to write to."""
        self._thread: threading.Thread | None = None
        if show is None:
            return
        read, self.fd = os.pipe()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=_copy, args=(read, os.dup(log), show), name="prints", daemon=True)
        self._thread.start()

    def __enter__(self) -> Printed:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            os.close(self.fd)

    def join(self, timeout_s: float) -> None:
        """Wait until all is shown, which is once no process has the pipe any more; returns after timeout_s anyway."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def _copy(source: int, log: int, show: Callable[[str], None]) -> None:
    rest = b""
    with open(source, "rb", buffering=0) as lines_in, open(log, "ab", buffering=0) as kept:
        while data := lines_in.read(LINE_BYTES):
            # A full disk costs lines of the log, not the task.
            with contextlib.suppress(OSError):
                kept.write(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                show(_text(line))
            if len(rest) >= LINE_BYTES:
                show(_text(rest))
                rest = b""
    if rest:
        show(_text(rest))


def _text(line: bytes) -> str:
    """The line as a terminal would leave it: what was overwritten after a carriage return is gone."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def show(console: PlainConsole, line: str) -> None:
    """Print above the progress bar where both go to a terminal, else to the standard output."""
    if sys.stdout.isatty():
        console.say(line)
        return
    try:
        print(line, flush=True)
    except OSError:
        # Nobody reads it any more, as after `| head`.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
