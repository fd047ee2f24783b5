"""Carries out the program's actions; outcomes come back as events on the control thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint import Checkpoint
from shardline.codecs import auto
from shardline.codecs.measuring import measure_speeds
from shardline.errors import CheckpointError
from shardline_chief.io.checkpointer import Checkpointer
from shardline_chief.io.commands import Commander
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.telemetry import Telemetry
from shardline_chief.rules.actions import (
    Action,
    Answer,
    Command,
    CommandResult,
    Find,
    Finish,
    Found,
    Hurry,
    JournalLine,
    Lead,
    MarkBest,
    MeasureCodecs,
    Save,
    Saved,
    Say,
    Tell,
)
from shardline_chief.rules.program import Program
from shardline_chief.rules.state.checkpoints import Resume

log = logging.getLogger("shardline_chief.io.performer")


class Performer:
    """Carries out all actions except journal entries and the end."""

    def __init__(
        self,
        program: Program,
        *,
        commander: Commander,
        checkpointer: Checkpointer,
        reporter: Reporter,
        telemetry: Telemetry,
        post: Callable[[Callable[[float], None]], None],
    ) -> None:
        """post(event): has event(now_s) called on the control thread."""
        self._program = program
        self._commander = commander
        self._checkpointer = checkpointer
        self._reporter = reporter
        self._telemetry = telemetry
        self._post = post

    def do(self, action: Action, now_s: float) -> None:
        """Carry out one action; its outcome comes back as an event."""
        match action:
            case Answer():
                settle(action.ticket, action.value)
            case Say():
                self._reporter.event(action.kind, action.sentence, action.level, action.fields)
                if action.kind == "evaluation":
                    self._reporter.evaluation(int(action.fields["step"]), action.fields["metrics"])
            case Tell():
                log.info("%s", action.sentence)
            case JournalLine():
                """Written already, before all other actions."""
            case Command():
                self._command(action)
            case Save():
                self._checkpointer.submit(action, lambda saved: self._post(lambda at_s: self._saved(saved, at_s)))
            case Hurry():
                self._checkpointer.hurry()
            case Find():
                self._commander.drop(action.lost)

                def told(checkpoint: Checkpoint | None, error: str) -> None:
                    self._post(lambda now_s: self._found(checkpoint, error, now_s))

                self._checkpointer.find(action.lost, told)
            case MeasureCodecs():
                threading.Thread(target=self._measure, name="codecs", daemon=True).start()
            case MarkBest():
                try:
                    self._checkpointer.store.mark_best(action.step, action.metrics)
                except CheckpointError as error:
                    self._reporter.event(
                        "best", f"step {action.step} is the best so far, but can't be kept: {error}", "warning", {}
                    )
            case Finish():
                """Handled by the caller: the thread ends with it."""

    def _command(self, command: Command) -> None:
        if isinstance(command.order, Lead):
            self._commander.open(command.order.addresses)

        def told(result: CommandResult) -> None:
            self._post(lambda now_s: self._program.done(command.number, result, now_s))

        self._commander.submit(command, told)

    def _saved(self, saved: Saved, now_s: float) -> None:
        self._telemetry.saved(saved)
        if saved.path:
            self._reporter.shelf.put(saved.step, Path(saved.path))
        self._program.saved(saved, now_s)
        self._telemetry.interval()

    def _found(self, checkpoint: Checkpoint | None, error: str, now_s: float) -> None:
        resume = Resume(checkpoint) if checkpoint is not None else None
        if self._program.found(Found(resume=resume, error=error), now_s):
            # If several servers were lost at once, the first answer counts: the second may arrive while it is in use.
            self._commander.resume = checkpoint

    def _measure(self) -> None:
        """Some seconds of work, beside training."""
        speeds: dict[str, auto.CodecSpeed] = {}
        try:
            # The figures are those of one core.
            torch.set_num_threads(1)
            speeds = measure_speeds(auto.NAMES)
        except Exception:
            # The job waits for this answer, whatever it is.
            log.exception("the codecs could not be measured")
        self._post(lambda now_s: self._program.measured(speeds, now_s))


def settle(future: Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Complete the future of a waiting call; the caller may have left meanwhile."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        log.debug("a caller disconnected before its answer was ready")
