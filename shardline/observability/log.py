"""Logging: one event per line, with the task and, if known, the step.

Modules log to logging.getLogger(__name__) as usual and pass facts as `extra={"step": 120, "shard": 2}`. setup() sends
them to stderr for people ("12:30:05 worker/1 step 120 loss 0.31") and, on request, to a file of JSON lines for
programs.
The root logger is left alone: in a user's script it is the user's.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import TextIO

from shardline.errors import UsageError
from shardline.host.printable import printable, printable_lines
from shardline.observability.lossy import lossy_text

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
