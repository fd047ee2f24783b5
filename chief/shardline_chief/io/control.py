"""The thread that owns the program: every event arrives through one queue, so no rule needs a lock.

Calls from the servicer, results of commands and checkpoints, and the passing of time are events. After each turn the
program's actions are carried out in order, and every task whose orders changed gets them. Each heartbeat is answered in
any case, so that a task can distinguish a silent chief from a dead one.
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
    ProtocolError,
    UsageError,
    as_error,
    exit_code_name,
)
from shardline.host.awake import awake_s
from shardline.observability.metrics import Metrics
from shardline_chief.io.checkpointer import Checkpointer, parameters_digest
from shardline_chief.io.commands import Commander
from shardline_chief.io.journal import Journal
from shardline_chief.io.performer import Performer, settle
from shardline_chief.io.reporter import Reporter, for_people
from shardline_chief.io.streams import StreamChannel, Streams
from shardline_chief.io.summary import SummaryFile, overview
from shardline_chief.io.telemetry import Telemetry
from shardline_chief.rules.actions import Finish, JournalLine
from shardline_chief.rules.messages import Beat, Join, JoinAnswer
from shardline_chief.rules.program import Program

log = logging.getLogger("shardline_chief.io.control")
T = TypeVar("T")

TICK_S = 0.1
TURN = 256
"""Most events handled before their actions are carried out."""
GOODBYE_S = 10.0
"""Most seconds that tasks get to exit after the end; a third of --timeout if that is less."""
WATCHER_S = 2.5
"""A client that asked for the status this recently is watching; the chief waits this long for it to see the end."""


class Control:
    """Runs the program. post() and call() are thread-safe; everything else belongs to run()'s thread."""

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
        """on_status: called a few times a second with the newest status, for the page; it must not block."""
        self.page = ""
        """Address of the chief's own page, as reported in the status."""
        self._on_status = on_status
        self.program = program
        self._journal = journal
        self._commander = commander
        self._checkpointer = checkpointer
        self._reporter = reporter
        self._summary = SummaryFile(program, reporter, out)
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
        """Another chief leads, and the job was left to it."""
        self._asked_s = -math.inf
        """When the status was last requested, other than by the chief's own page."""
        self._watcher_until_s = -math.inf
        """Until when the chief waits for a watching client to ask for the final status."""
        self._ended = threading.Event()

    # From any thread

    def post(self, event: Callable[[float], None]) -> None:
        """Have event(now_s) called on the control thread."""
        self._events.put(event)

    def call(self, question: Callable[[float], T]) -> Future[T]:
        """Like post, but returns a future with the result or exception."""
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
        """Like call, but the result is only delivered once the journal entries that the question caused are on disk.

        who: the life of the calling task. The future fails with ForbiddenError if the secret isn't that life's.
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
                "that task was given when it joined; nothing was changed"
            )

    def join(self, join: Join) -> Future[JoinAnswer]:
        """Ask for admission; the answer may have to wait until every ps knows the task."""
        ticket: Future[JoinAnswer] = Future()
        self.post(lambda now_s: self.program.join(ticket, join, now_s))
        return ticket

    def beat(self, beat: Beat, channel: StreamChannel) -> Future[None]:
        """Take in a heartbeat that arrived on a stream; the future is done once its turn has come."""
        taken: Future[None] = Future()
        self.post(lambda now_s: self._beat(beat, channel, taken, now_s))
        return taken

    def stream_ended(self, task: str, incarnation: int, channel: StreamChannel) -> None:
        """A heartbeat stream has ended, on either side."""
        self.post(lambda now_s: self._detach(task, incarnation, channel, now_s))

    def status(self) -> Future[ChiefStatus]:
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
        """End the job with a checkpoint; the future holds the stop step, 0 if it is not known yet."""
        return self.call(lambda now_s: self.program.stop(reason, now_s))

    def trainer_ended(self, code: int) -> None:
        """The chief's own training process has exited; its work is handed on like any dead worker's."""

        def ended(now_s: float) -> None:
            state = self.program.state
            if code or state.phase in (Phase.WAITING, Phase.INIT, Phase.RUNNING):
                name = exit_code_name(code) if code else "although the job has not ended"
                state.say("trainer", f"the chief's training process ended with exit code {code} ({name})", "error")

        self.post(ended)

    # The thread

    def run(self) -> int:
        """Run until the job has ended and its tasks are gone; returns the exit code."""
        while True:
            events = self._due()
            now_s = awake_s()
            if now_s >= self._next_tick_s:
                self._next_tick_s = now_s + TICK_S
                events.append(self._tick)
            for event in events:
                try:
                    event(now_s)
                    self.program.note()
                except Exception as error:
                    # A bug in the rules, or in a plugin's: no decision of the program can be trusted any more.
                    log.exception("the chief failed")
                    found = as_error(error) or InternalError(f"the chief failed: {type(error).__name__}: {error}")
                    self.program.fatal(found.exit_code, str(found), now_s)
            actions = self.program.take()
            # One fsync for everything decided in this turn, before any of it is done.
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
                self._summary.complete()
                return self.program.state.exit_code

    def _due(self) -> list[Callable[[float], None]]:
        """The events that have arrived; empty if it is time for a tick."""
        found: list[Callable[[float], None]] = []
        with contextlib.suppress(queue.Empty):
            wait_s = max(0.0, min(TICK_S, self._next_tick_s - awake_s()))
            found.append(self._events.get(timeout=wait_s))
            while len(found) < TURN:
                found.append(self._events.get_nowait())
        return found

    def _tick(self, now_s: float) -> None:
        self.program.tick(now_s)
        self._reporter.report("", (), self.program.heartbeats.reached)
        if self._telemetry.tick(now_s):
            self._show(now_s)

    def _gone(self, now_s: float) -> bool:
        """Whether all tasks have closed their streams and any watching client has seen the end, or time has run out."""
        assert self._goodbye_s is not None
        there = self._streams.there()
        if not there:
            return now_s >= self._watcher_until_s
        if now_s < self._goodbye_s:
            return False
        log.warning("still running after the end: %s", ", ".join(sorted(there)))
        return True

    # Streams

    def _beat(self, beat: Beat, channel: StreamChannel, taken: Future[None], now_s: float) -> None:
        settle(taken)
        try:
            self._check(beat.sender)
        except ForbiddenError as error:
            # Not forwarded: neither the life nor the stream of the named task is affected.
            channel.send(error)
            return
        key = (beat.task, beat.incarnation)
        try:
            alive = self.program.beat(beat, now_s)
        except ProtocolError as error:
            channel.send(error)
            return
        # Anyone can send any name: only admitted tasks may become labels, or the metrics would grow without bound.
        peer = beat.task if self.program.state.tasks.members.get(beat.task) is not None else "unknown"
        if alive:
            self._metrics.counter("shardline_heartbeats_total", peer=peer).inc()
        self._show_work(beat, time.monotonic())
        if not self._streams.heard(key, channel, alive=alive):
            self._metrics.counter("shardline_fenced_messages_total", peer=peer).inc()

    @for_people
    def _show_work(self, beat: Beat, now_s: float) -> None:
        """Hand on what a heartbeat says for people: finished steps and passes of a pipeline.

        now_s: by the system's clock, as times of passes are.
        """
        job, heartbeats = self.program.state.job, self.program.heartbeats
        self._reporter.report(beat.task, heartbeats.reported(beat), None)
        if beat.passes and job is not None and heartbeats.trains(beat):
            life = beat.task, beat.incarnation
            self._reporter.passes.heard(job, life, beat.passes, sent_s=beat.clock_s, now_s=now_s)

    def _detach(self, task: str, incarnation: int, channel: StreamChannel, now_s: float) -> None:
        if self._streams.detach((task, incarnation), channel):
            self.program.stream_broken(task, incarnation, now_s)

    # The journal

    def _record(self, records: Sequence[JournalLine], now_s: float) -> None:
        if not records:
            return
        faults = self.program.state.figures.faults
        try:
            self._journal.write_all((record.kind, self._summary.noted(record, now_s)) for record in records)
        except OSError as error:
            sentence = f"the journal in {self._journal.folder} can't be written: {error.strerror}"
            if self.program.state.phase in (Phase.WAITING, Phase.INIT):
                # Nothing has been trained yet, so nothing is lost by stopping here.
                self.program.fatal(UsageError.exit_code, f"{sentence}; choose another --out", now_s)
            elif "journal" not in faults:
                faults["journal"] = f"{sentence}; training continues, but a restarted chief could not take over"
                self._reporter.event("journal_failed", faults["journal"], "error", {})
        else:
            faults.pop("journal", None)

    @for_people
    def _show(self, now_s: float) -> None:
        if self._on_status is not None:
            self._on_status(self._overview(now_s))

    # The end

    def _finish(self, finish: Finish) -> None:
        if finish.resigned:
            # Leave everything to the chief that leads now: no summary, no orders, no commands.
            self._streams.close()
            self.resigned = True
            return
        watched = awake_s() - self._asked_s < WATCHER_S
        # Tasks must learn of the end before a ps exits, or they would report it as lost; and before the digest, which
        # takes long for a large model.
        self._streams.push_orders()
        self._commander.stop_all(finish.reason)
        self._show(awake_s())
        self._telemetry.close()
        store: CheckpointStore = self._checkpointer.store
        digest = ""
        if self.program.state.saves.checkpoint_step >= 0:
            try:
                digest = parameters_digest(store.open(self.program.state.saves.checkpoint_step, verify=False))
            except CheckpointError as error:
                log.warning("no digest of the parameters: %s", error)
        self._reporter.report("", (), self.program.heartbeats.reached)
        now_s = awake_s()
        self._goodbye_s = now_s + min(GOODBYE_S, self.program.state.timeouts.dead_s)
        if watched:
            self._watcher_until_s = now_s + WATCHER_S
        self._summary.write(self._summary.value(digest, now_s))
