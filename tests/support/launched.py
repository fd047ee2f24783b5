"""What `shardline train` does with the events of its cluster, which are given here, without a process."""

from __future__ import annotations

import io
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shardline.cli import progress
from shardline.cli.launcher import LocalCluster
from shardline.cli.process_exits import describe_code
from shardline.cli.terminal import PlainConsole
from shardline.cli.train import LaunchedRun
from shardline.core.status import ChiefStatus
from shardline.core.timeouts import Timeouts
from shardline.security import PLAIN


class Launched:
    """A cluster whose events are given; `why` is what it lacks."""

    chief_address = "127.0.0.1:1"

    def __init__(self, out: Path, *events: object, why: str = "") -> None:
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        for event in events:
            self.events.put(event)
        self.options = SimpleNamespace(
            describe=lambda _task, code: describe_code(code, script=False),
            timeouts=Timeouts(total_s=30.0),
            script=False,
            out=out,
            security=PLAIN,
        )
        self.why = why
        self.interrupted = 0
        self.stopped = False

    def lacking(self, *, begun: bool) -> str:
        return self.why

    def last_words(self, task: str) -> str:
        return f"{task} has had enough"

    def log_tail(self, task: str, lines: int = 20) -> list[str]:
        return []

    def interrupt(self) -> None:
        self.interrupted += 1

    def tasks(self) -> list[str]:
        return ["chief/0"]

    def running(self) -> list[str]:
        return []

    def stop(self) -> None:
        self.stopped = True


class Display:
    """A display that keeps the lines that stay."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, sentence: str) -> None:
        self.lines.append(sentence)

    def update(self, status: ChiefStatus) -> None:
        pass

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


Watch = Callable[[Launched], tuple[int, list[str]]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Follows a run to its end; returns the exit code and what was shown after the start."""

    def follow(cluster: Launched) -> tuple[int, list[str]]:
        display = Display()
        monkeypatch.setattr(progress, "make_display", lambda console: display)
        run = LaunchedRun(cast(LocalCluster, cluster), PlainConsole(file=io.StringIO()))
        code = run.to_the_end(None)
        assert cluster.stopped
        first, *lines = display.lines
        assert first.startswith("started 1 chief")
        return code, lines

    return follow
