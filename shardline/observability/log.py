"""Logging: one event per line, with the task and, if known, the step.

Modules log to logging.getLogger(__name__) as usual and pass facts as `extra={"step": 120, "shard": 2}`. setup() sends
them to stderr for people ("12:30:05 worker/1 step 120 loss 0.31") and, on request, to a file of JSON lines for
programs.
The root logger is left alone: in a user's script it is the user's. A full or failing disk costs log lines, never the
process that writes them.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from shardline.errors import UsageError
from shardline.host import files
from shardline.host.printable import printable, printable_lines

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def unheard(error: OSError) -> None:
    """Ignore a loss that can't be reported."""


class LossyFile(io.FileIO):
    """A writable file that drops what can't be written, and reports that once: on_loss(error)."""

    def __init__(self, file: str | int, *, on_loss: Callable[[OSError], None] = unheard) -> None:
        """file: a path to append to, or a descriptor that stays open."""
        # A plain open of a FIFO would block until someone reads it.
        opener = (lambda name, _: files.append_fd(Path(name))) if isinstance(file, str) else None
        super().__init__(file, "a", closefd=isinstance(file, str), opener=opener)
        self._on_loss = on_loss
        self._told = False

    def write(self, data: object) -> int:
        """Accept everything, written or not."""
        rest = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(rest)
        try:
            while rest:
                rest = rest[os.write(self.fileno(), rest) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._told:
                self._told = True
                self._on_loss(error)
        return size


def lossy_text(file: str | int, *, on_loss: Callable[[OSError], None] = unheard) -> TextIO:
    """A text stream over a LossyFile; each write is passed on at once."""
    raw = LossyFile(file, on_loss=on_loss)
    # A raw file supports everything that is needed of a buffer here.
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def protect_output() -> None:
    """Make this process's stdout and stderr lossy if they are files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
            if stat.S_ISREG(os.fstat(number).st_mode):
                stream.flush()
                setattr(sys, name, lossy_text(number))
        except (AttributeError, OSError, ValueError):
            # No stream, or one without a descriptor, as in a test.
            continue


LOGGERS = ("shardline", "shardline_ps", "shardline_worker", "shardline_chief", "shardline_evaluator")
"""Package loggers that setup() configures; the roles' packages are named, not imported."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_handlers: list[logging.Handler] = []


class HumanFormatter(logging.Formatter):
    """Lines such as "12:30:05 worker/1 step 120 WARNING ps/0 is silent"; times are local."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self._task = task

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on lines of its own."""
        parts = [time.strftime("%H:%M:%S", time.localtime(record.created)), self._task]
        step = getattr(record, "step", None)
        if step is not None:
            parts.append(f"step {step}")
        if record.levelno != logging.INFO:
            parts.append(record.levelname)
        parts.append(printable(record.getMessage()))
        line = " ".join(parts)
        if record.exc_info:
            line = f"{line}\n{printable_lines(self.formatException(record.exc_info))}"
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per event: time_s (seconds since 1970), task, level, logger, message, and `extra`'s fields."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self._task = task

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time_s": round(record.created, 3),
            "task": self._task,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        event.update((key, value) for key, value in vars(record).items() if key not in _STANDARD and key not in event)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


class _File(logging.FileHandler):
    """Appends to a file; lines that can't be written are dropped, which is reported once, on stderr."""

    def _open(self) -> TextIO:  # type: ignore[override]
        def lost(error: OSError) -> None:
            text = f"the log {self.baseFilename} can't be written: {error.strerror}; lines are lost until it can be"
            print(f"shardline: {text}", file=sys.stderr)

        return lossy_text(self.baseFilename, on_loss=lost)


def setup(task: str, *, json_path: Path | None = None, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Log this process's events as `task`, to stderr and to json_path (appended to; its folder is created).

    A second call replaces the first setup. Raises UsageError if json_path can't be written.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    handlers[0].setFormatter(HumanFormatter(task))
    if json_path is not None:
        try:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_File(json_path))
        except OSError as error:
            raise UsageError(f"the log {json_path} can't be written: {error.strerror}; choose another --out") from None
        handlers[1].setFormatter(JsonFormatter(task))
    close()
    _handlers.extend(handlers)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        for handler in handlers:
            logger.addHandler(handler)


def close() -> None:
    """Undo setup(): close its files and let events propagate again."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for handler in _handlers:
            logger.removeHandler(handler)
        logger.propagate = True
    for handler in _handlers:
        handler.close()
    _handlers.clear()
