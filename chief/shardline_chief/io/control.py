"""The thread that owns the program: everything that happens comes through one queue, so no rule needs a lock.

Calls from the servicer, results of commands and checkpoints, and time are events. After each, the program's actions are
carried out in order, and every task whose orders changed is told; a heartbeat is answered in any case, so that a task
can tell a chief with nothing new to say from one that has gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from shardline.checkpoint import CheckpointStore
from shardline.core.identity import Identity
from shardline.core.orders import Phase
from shardline.core.status import ChiefStatus
from shardline.errors import (
    CheckpointError,
    ForbiddenError,
    InternalError,
    UsageError,
    exit_code_name,
)
from shardline.observability.metrics import Metrics
from shardline_chief.io.checkpointer import Checkpointer, parameters_digest
from shardline_chief.io.commands import Commander
from shardline_chief.io.journal import Journal
from shardline_chief.io.performer import Performer, settle
from shardline_chief.io.reporter import Reporter
from shardline_chief.io.streams import Channel, Streams
from shardline_chief.io.summary import overview, summary, write_json
from shardline_chief.io.telemetry import Telemetry
from shardline_chief.rules.actions import (
    Finish,
    JournalLine,
)
from shardline_chief.rules.messages import Beat, Join, JoinAnswer
from shardline_chief.rules.program import Program

log = logging.getLogger("shardline_chief.io.control")
T = TypeVar("T")

TICK_S = 0.1
TURN = 256
"""Most events that are dealt with before their actions are carried out."""
GOODBYE_S = 10.0
"""How long tasks may take to go after the end, at most; a third of --timeout where that is less."""
WATCHER_S = 2.5
"""Who asked for the status so recently watches the job; how long the chief stays for it to hear of the end, at most."""


class Control:
    """Runs the program. post() and call() are safe from any thread; all else belongs to run()'s thread."""

    def __init__(
        self,
        program: Program,
        *,
        journal: Journal,
        commander: Commander,
        checkpointer: Checkpointer,
        reporter: Reporter,
        metrics: Metrics,
        out: Path,
        on_status: Callable[[ChiefStatus], None] | None = None,
    ) -> None:
        """on_status: called with the newest status some times a second, for the page; it must not block."""
        self.page = ""
        """Address of the chief's own page, for those who ask for the status."""
        self._on_status = on_status
        self.program = program
        self._journal = journal
        self._commander = commander
        self._checkpointer = checkpointer
        self._reporter = reporter
        self._metrics = metrics
        self._out = out
        self._events: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._streams = Streams(program)
        self._telemetry = Telemetry(program, reporter, metrics, out)
        self._performer = Performer(
            program,
            commander=commander,
            checkpointer=checkpointer,
            reporter=reporter,
            telemetry=self._telemetry,
            post=self.post,
        )
        self._next_tick_s = 0.0
        self._goodbye_s: float | None = None
        self.resigned = False
        """Another chief leads, to whom the job was left."""
        self._asked_s = -math.inf
        """When the status was asked for last, other than by the chief's own page."""
        self._watcher_until_s = -math.inf
        """Until when somebody who watches the job may still come to hear of its end."""
        self._ended = threading.Event()

    # From any thread

    def post(self, event: Callable[[float], None]) -> None:
        """Have event(now) called on the control thread."""
        self._events.put(event)

    def call(self, question: Callable[[float], T]) -> Future[T]:
        """Like post, with the result or exception in a future."""
        future: Future[T] = Future()

        def event(now_s: float) -> None:
            try:
                result = question(now_s)
            except Exception as error:
                settle(future, error=error)
            else:
                settle(future, result)

        self.post(event)
        return future

    def call_noted(self, who: Identity, question: Callable[[float], T]) -> Future[T]:
        """Like call, but the result comes only once the journal has what the question made to be noted.

        who: the life of a task that asks. Fails with ForbiddenError where the secret isn't that life's.
        """
        ticket: Future[T] = Future()

        def event(now_s: float) -> None:
            try:
                self._check(who)
                result = question(now_s)
            except Exception as error:
                settle(ticket, error=error)
            else:
                self.program.state.outbox.answer(ticket, result)

        self.post(event)
        return ticket

    def _check(self, who: Identity) -> None:
        if not self.program.state.tasks.members.speaks_for(who):
            raise ForbiddenError(
                f"the message is not from {who.task}: it lacks the secret that incarnation {who.incarnation:#x} of "
                "that task was given when it joined; nothing changed"
            )

    def join(self, join: Join) -> Future[JoinAnswer]:
        """Ask for admission; the answer may take until every ps knows the task."""
        ticket: Future[JoinAnswer] = Future()
        self.post(lambda now_s: self.program.join(ticket, join, now_s))
        return ticket

    def beat(self, beat: Beat, channel: Channel) -> None:
        """A heartbeat that came over a stream."""
        self.post(lambda now_s: self._beat(beat, channel, now_s))

    def stream_ended(self, task: str, incarnation: int, channel: Channel) -> None:
        """A heartbeat stream is over, whichever side ended it."""
        self.post(lambda now_s: self._detach(task, incarnation, channel, now_s))

    def status(self) -> Future[ChiefStatus]:
        """The job at a glance."""
        return self.call(self._asked)

    def _asked(self, now_s: float) -> ChiefStatus:
        found = self._overview(now_s)
        self._asked_s = now_s
        if self._goodbye_s is not None:
            self._watcher_until_s = -math.inf
        return found

    def _overview(self, now_s: float) -> ChiefStatus:
        return overview(self.program, self._reporter, self._out, now_s, page=self.page)

    def request_stop(self, reason: str) -> Future[int]:
        """End the job with a checkpoint."""
        return self.call(lambda now_s: self.program.stop(reason, now_s))

    def trainer_ended(self, code: int) -> None:
        """The chief's own training process has gone; what it did is taken over like any dead worker's."""

        def ended(now_s: float) -> None:
            state = self.program.state
            if code or state.phase in (Phase.WAITING, Phase.INIT, Phase.RUNNING):
                name = exit_code_name(code) if code else "though the job has not ended"
                state.say("trainer", f"the chief's training process ended with exit code {code} ({name})", "error")

        self.post(ended)

    # The thread

    def run(self) -> int:
        """Run until the job has ended and its tasks are gone; returns the exit code."""
        while True:
            events = self._due()
            now_s = time.monotonic()
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + TICK_S
                events.append(self._tick)
            for event in events:
                self._happened(event, now_s)
            actions = self.program.take()
            # One visit to the disk for all that was decided in this turn, before any of it is done.
            self._record([action for action in actions if isinstance(action, JournalLine)], now_s)
            for action in actions:
                if isinstance(action, Finish):
                    self._finish(action)
                else:
                    self._performer.do(action, now_s)
            if self.resigned:
                return self.program.state.exit_code
            self._streams.push_orders()
            if self._goodbye_s is not None and self._gone(now_s):
                return self.program.state.exit_code

    def _due(self) -> list[Callable[[float], None]]:
        """What has happened, or nothing where it is time for a tick."""
        found: list[Callable[[float], None]] = []
        with contextlib.suppress(queue.Empty):
            wait_s = max(0.0, min(TICK_S, self._next_tick_s - time.monotonic()))
            found.append(self._events.get(timeout=wait_s))
            while len(found) < TURN:
                found.append(self._events.get_nowait())
        return found

    def _happened(self, event: Callable[[float], None], now_s: float) -> None:
        try:
            event(now_s)
            self.program.note()
        except Exception as error:
            # A defect in the rules: nothing the program decides can be trusted any more.
            log.exception("the chief failed")
            self.program.fatal(InternalError.exit_code, f"the chief failed: {type(error).__name__}: {error}", now_s)

    def _tick(self, now_s: float) -> None:
        self.program.tick(now_s)
        if self._telemetry.tick(now_s):
            self._show(now_s)

    def _gone(self, now_s: float) -> bool:
        """Whether every task has let go of its stream and who watches has heard of the end, or the time is over."""
        assert self._goodbye_s is not None
        there = self._streams.there()
        if not there:
            return now_s >= self._watcher_until_s
        if now_s < self._goodbye_s:
            return False
        log.warning("still there after the end: %s", ", ".join(sorted(there)))
        return True

    # Streams

    def _beat(self, beat: Beat, channel: Channel, now_s: float) -> None:
        try:
            self._check(beat.sender)
        except ForbiddenError as error:
            # Neither life nor stream of the task that it names hears of it.
            channel.refuse(error)
            return
        key = (beat.task, beat.incarnation)
        alive = self.program.beat(beat, now_s)
        # Anybody can send any name: only those that were admitted may become labels, or figures grow without end.
        known = self.program.state.tasks.members.get(beat.task) is not None
        peer = beat.task if known else "unknown"
        if alive:
            self._metrics.counter("shardline_heartbeats_total", peer=peer).inc()
        if steps := self.program.heartbeats.reported(beat):
            self._reporter.report(beat.task, steps)
        if not self._streams.heard(key, channel, alive=alive):
            self._metrics.counter("shardline_fenced_messages_total", peer=peer).inc()

    def _detach(self, task: str, incarnation: int, channel: Channel, now_s: float) -> None:
        if self._streams.detach((task, incarnation), channel):
            self.program.stream_broken(task, incarnation, now_s)

    # The journal

    def _record(self, records: Sequence[JournalLine], now_s: float) -> None:
        if not records:
            return
        faults = self.program.state.figures.faults
        try:
            self._journal.write_all((record.kind, record.fields) for record in records)
        except OSError as error:
            sentence = f"the journal in {self._journal.folder} can't be written: {error.strerror}"
            if self.program.state.phase in (Phase.WAITING, Phase.INIT):
                # Nothing has been trained yet, so nothing is lost by not going on without a memory.
                self.program.fatal(UsageError.exit_code, f"{sentence}; choose another --out", now_s)
            elif "journal" not in faults:
                faults["journal"] = f"{sentence}; training continues, but no other chief could take over this job"
                self._reporter.event("journal_failed", faults["journal"], "error", {})
        else:
            faults.pop("journal", None)

    def _show(self, now_s: float) -> None:
        if self._on_status is not None:
            self._on_status(self._overview(now_s))

    # The end

    def _resign(self) -> None:
        """Leave everything to the chief that leads now: no summary, no orders, no commands."""
        self._streams.close()
        self.resigned = True

    def _finish(self, finish: Finish) -> None:
        if finish.resigned:
            self._resign()
            return
        watched = time.monotonic() - self._asked_s < WATCHER_S
        # Tasks hear of the end before a ps goes, or they would take its going for a fault; and before the digest, which
        # takes its time with a large model.
        self._streams.push_orders()
        self._commander.stop_all(finish.reason)
        self._show(time.monotonic())
        self._telemetry.close()
        store: CheckpointStore = self._checkpointer.store
        digest = ""
        if self.program.state.saves.checkpoint_step >= 0:
            try:
                digest = parameters_digest(store.open(self.program.state.saves.checkpoint_step, verify=False))
            except CheckpointError as error:
                log.warning("no digest of the parameters: %s", error)
        now_s = time.monotonic()
        self._goodbye_s = now_s + min(GOODBYE_S, self.program.state.timeouts.dead_s)
        if watched:
            self._watcher_until_s = now_s + WATCHER_S
        value = summary(self.program, sha256=digest, out=self._out, now_s=now_s)
        try:
            write_json(self._out / "summary.json", value)
        except OSError as error:
            self._reporter.event("summary_failed", f"no summary: {self._out}: {error.strerror}", "error", {})
            # That of an earlier run of this folder would be taken for this one's.
            with contextlib.suppress(OSError):
                (self._out / "summary.json").unlink(missing_ok=True)
