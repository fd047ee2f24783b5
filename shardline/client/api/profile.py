"""A trace of some steps of one worker: torch.profiler's, with the exchange of each shard beside it (--profile)."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardline.client.exchange.shard_exchange import StepFigures
from shardline.config import RoleConfig, profiled_steps
from shardline.errors import JobError
from shardline.host import files

log = logging.getLogger("shardline.client")

FIRST_LINE = 1 << 30
"""Number of shard 0's line in the trace, above all thread ids."""


class StepProfile:
    """The trace of the steps that --profile names, by the numbers of the worker's loop. Used by the session's thread.

    It is written when the step after them has begun, since the next forward pass may run while a step is exchanged.
    """

    def __init__(self, config: RoleConfig, steps: range) -> None:
        self._steps = steps
        self._path = (config.out or Path()).absolute() / f"trace-{config.task.replace('/', '-')}.json"
        self._profiler: profile | None = None
        self._running = self._ended = False
        self._span: record_function | None = None
        self._began: dict[str, float] = {}
        """When each step began, by the name of its span and the monotonic clock."""
        self._exchanges: list[dict[str, Any]] = []

    @classmethod
    def of(cls, config: RoleConfig) -> StepProfile | None:
        """The trace that the settings ask for; None if they don't."""
        steps = profiled_steps(config.profile)
        return None if steps is None else cls(config, steps)

    def check(self, passes: int) -> None:
        """Raise JobError if the first step is not one of a job's passes; 0 = their number is not known."""
        if 0 < passes <= self._steps.start:
            raise JobError(
                f"--profile {self._steps.start}:{self._steps.stop} begins after the last step, {passes - 1}: steps "
                "are counted from 0"
            )

    def at(self, step: int) -> None:
        """Begin, continue or end with this step, which is about to be computed."""
        if self._ended:
            return
        if not self._running and self._profiler is not None:
            self.end()
            return
        self._end_span()
        if step in self._steps:
            if self._profiler is None:
                cuda = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
                self._profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
                self._profiler.start()
                self._running = True
            name = f"step {step}"
            self._span = record_function(name)
            self._began.setdefault(name, time.monotonic())
            self._span.__enter__()  # type: ignore[no-untyped-call]
        elif self._running:
            self._stop()

    def exchanged(self, figures: StepFigures) -> None:
        """Add the exchange of a step that has been closed, unless it began before the first step of the trace."""
        if self._profiler is None:
            return
        first_s = next(iter(self._began.values()))
        for shard, outcome in figures.outcomes.items():
            start_s = outcome.began_s
            if start_s < first_s:
                continue
            for name, seconds in zip(("push", "wait", "pull"), outcome.parts(start_s), strict=True):
                span = {"ph": "X", "cat": "shardline", "name": name, "ts": start_s * 1e6, "dur": seconds * 1e6}
                self._exchanges.append({**span, "tid": FIRST_LINE + shard})
                start_s += seconds

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def _stop(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._running = False

    def end(self) -> None:
        """Write the trace, if steps were recorded; there is no other from then on."""
        if self._ended:
            return
        self._ended, steps = True, self._steps
        if self._profiler is None:
            log.warning("--profile %d:%d: this worker made none of these steps: no trace", steps.start, steps.stop)
            return
        self._end_span()
        if self._running:
            self._stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._add_exchanges(found["traceEvents"])
            files.replace(self._path, json.dumps(found).encode())
        except OSError as error:
            log.warning("the trace %s can't be written: %s", self._path, error.strerror)
        else:
            log.info("the trace of %d steps is in %s: open it at ui.perfetto.dev", len(self._began), self._path)
        self._profiler = None

    def _add_exchanges(self, events: list[dict[str, Any]]) -> None:
        """Add the spans of the exchanges to a trace, which has a clock of its own."""
        name, began_s = next(iter(self._began.items()))
        ahead = min(event["ts"] for event in events if event["name"] == name) - began_s * 1e6
        pid = os.getpid()
        for line in sorted({span["tid"] for span in self._exchanges}):
            named = {"name": f"exchange with shard {line - FIRST_LINE}"}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": line, "args": named})
        events += [{**span, "pid": pid, "ts": span["ts"] + ahead} for span in self._exchanges]
