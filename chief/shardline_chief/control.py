"""The thread that owns the program: everything that happens comes through one queue, so no rule needs a lock.

Calls from the servicer, results of commands and checkpoints, and time are events. After each, the program's actions are
carried out in order, and every task whose orders changed is told; a heartbeat is answered in any case, so that a task
can tell a chief with nothing new to say from one that has gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardline.checkpoint import Checkpoint, CheckpointStore
from shardline.errors import (
    CheckpointError,
    ForbiddenError,
    InternalError,
    ShardlineError,
    UsageError,
    exit_code_name,
)
from shardline.identity import Identity
from shardline.metrics import Metrics
from shardline.rpc.link import Orders, Phase
from shardline.rpc.status import ChiefStatus, Traffic
from shardline_chief.actions import (
    Action,
    Answer,
    Command,
    CommandResult,
    Find,
    Finish,
    Found,
    Hurry,
    Lead,
    MarkBest,
    Record,
    Save,
    Saved,
    Say,
    Tell,
)
from shardline_chief.checkpointer import Checkpointer, ResumePoint, parameters_digest
from shardline_chief.commands import Commander
from shardline_chief.journal import Journal
from shardline_chief.membership import State as Life
from shardline_chief.messages import Beat, Join, JoinAnswer
from shardline_chief.program import Program
from shardline_chief.reporter import Reporter
from shardline_chief.summary import overview, summary, write_json
from shardline_chief.targets import Targets

log = logging.getLogger("shardline_chief.control")
T = TypeVar("T")

TICK_S = 0.1
TURN = 256
"""Most events that are dealt with before their actions are carried out."""
RATES_S = 0.5
GOODBYE_S = 10.0
"""How long tasks may take to go after the end, at most; a third of --timeout where that is less."""
WATCHER_S = 2.5
"""Who asked for the status so recently watches the job; how long the chief stays for it to hear of the end, at most."""


class Channel(Protocol):
    """Where one heartbeat stream's orders go. Called from the control thread."""

    def send(self, orders: Orders) -> None:
        """Queue orders."""
        ...

    def close(self) -> None:
        """No more orders: the stream ends."""
        ...

    def refuse(self, error: ShardlineError) -> None:
        """The stream ends with this error."""
        ...


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
        self._channels: dict[tuple[str, int], Channel] = {}
        self._sent: dict[tuple[str, int], Orders] = {}
        self._heard: set[tuple[str, int]] = set()
        """Lives whose heartbeat has not been answered yet."""
        self._next_tick_s = 0.0
        self._next_rates_s = 0.0
        self._reported = 0
        """Timeline whose training the reporter was told of."""
        self._goodbye_s: float | None = None
        self.resigned = False
        """Another chief leads, to whom the job was left."""
        self._asked_s = -math.inf
        """When the status was asked for last, other than by the chief's own page."""
        self._watcher_until_s = -math.inf
        """Until when somebody who watches the job may still come to hear of its end."""
        self._ended = threading.Event()
        self._targets: Targets | None = None
        # A first checkpoint that never comes grows old too.
        metrics.gauge("shardline_checkpoint_timestamp_seconds").set(time.time())

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
                _settle(future, error=error)
            else:
                _settle(future, result)

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
                _settle(ticket, error=error)
            else:
                self.program.state.answer(ticket, result)

        self.post(event)
        return ticket

    def _check(self, who: Identity) -> None:
        if not self.program.state.members.speaks_for(who):
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
            self._record([action for action in actions if isinstance(action, Record)], now_s)
            for action in actions:
                self._do(action, now_s)
            if self.resigned:
                return self.program.state.exit_code
            self._push_orders()
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
        self._figures(now_s)

    def _gone(self, now_s: float) -> bool:
        """Whether every task has let go of its stream and who watches has heard of the end, or the time is over."""
        assert self._goodbye_s is not None
        # Admitted just now and without a stream yet: nobody would be left to tell it of the end.
        silent = {m.task for m in self.program.state.members if m.living and (m.task, m.incarnation) not in self._sent}
        there = silent | {task for task, _ in self._channels}
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
        known = self.program.state.members.get(beat.task) is not None
        peer = beat.task if known else "unknown"
        if alive:
            self._metrics.counter("shardline_heartbeats_total", peer=peer).inc()
            self._heard.add(key)
        if steps := self.program.workers.reported(beat):
            self._reporter.report(beat.task, steps)
        if self._channels.get(key) is channel:
            return
        if not alive:
            self._metrics.counter("shardline_fenced_messages_total", peer=peer).inc()
            channel.send(dataclasses.replace(self.program.orders(*key), version=1 << 62))
            channel.close()
            return
        self._channels[key] = channel

    def _detach(self, task: str, incarnation: int, channel: Channel, now_s: float) -> None:
        key = (task, incarnation)
        # A newer stream of the same life may have taken its place already.
        if self._channels.get(key) is channel:
            del self._channels[key]
            self.program.stream_broken(task, incarnation, now_s)

    def _push_orders(self) -> None:
        state = self.program.state
        for key, channel in list(self._channels.items()):
            if state.returning and state.members.current(*key):
                # It goes on by the orders it has until this chief knows what holds.
                continue
            # Grows over terms: a task takes no orders that are older than those it has.
            last = self._sent.get(key, Orders(version=state.settings.term << 32))
            orders = dataclasses.replace(self.program.orders(*key), version=last.version)
            if orders != last or key not in self._sent:
                orders = dataclasses.replace(orders, version=last.version + 1)
                self._sent[key] = orders
                channel.send(orders)
            elif key in self._heard:
                channel.send(last)
            if not self.program.state.members.current(*key):
                # It has got its last orders (fenced, or good-bye); the stream ends behind them.
                channel.close()
                del self._channels[key]
        self._heard.clear()

    # Actions

    def _do(self, action: Action, now_s: float) -> None:
        match action:
            case Answer():
                _settle(action.ticket, action.value)
            case Say():
                self._say(action)
            case Tell():
                log.info("%s", action.sentence)
            case Record():
                """Done already, before all others."""
            case Command():
                self._command(action)
            case Save():
                self._checkpointer.submit(action, lambda saved: self.post(lambda at_s: self._saved(saved, at_s)))
            case Hurry():
                self._checkpointer.hurry()
            case Find():
                self._find(action)
            case MarkBest():
                self._mark_best(action)
            case Finish():
                self._finish(action)

    def _say(self, say: Say) -> None:
        self._reporter.event(say.kind, say.sentence, say.level, say.fields)
        if say.kind == "evaluation":
            self._reporter.evaluation(int(say.fields["step"]), say.fields["metrics"])

    def _record(self, records: Sequence[Record], now_s: float) -> None:
        if not records:
            return
        faults = self.program.state.faults
        try:
            self._journal.write_all((record.kind, record.fields) for record in records)
        except OSError as error:
            sentence = f"the journal in {self._journal.folder} can't be written: {error.strerror}"
            if self.program.state.phase in (Phase.WAITING, Phase.INIT):
                # Nothing has been trained yet, so nothing is lost by not going on without a memory.
                self.program.fatal(UsageError.exit_code, f"{sentence}; choose another --out", now_s)
            elif "journal" not in faults:
                faults["journal"] = f"{sentence}; training goes on, but no other chief could go on with this job"
                self._reporter.event("journal_failed", faults["journal"], "error", {})
        else:
            faults.pop("journal", None)

    def _command(self, command: Command) -> None:
        if isinstance(command.order, Lead):
            self._commander.open(command.order.addresses)

        def told(result: CommandResult) -> None:
            self.post(lambda now_s: self.program.done(command.number, result, now_s))

        self._commander.submit(command, told)

    def _saved(self, saved: Saved, now_s: float) -> None:
        self._reporter.checkpoint(saved.step, saved.seconds, saved.nbytes, failed=bool(saved.error))
        if not saved.error:
            self._metrics.gauge("shardline_checkpoint_timestamp_seconds").set(time.time())
        if saved.path:
            self._reporter.shelf.put(saved.step, Path(saved.path))
        self.program.saved(saved, now_s)
        if least := self.program.state.least_interval:
            self._metrics.gauge("shardline_checkpoint_interval_steps").set(least)

    def _find(self, find: Find) -> None:
        self._commander.drop(find.lost)

        def told(checkpoint: Checkpoint | None, error: str) -> None:
            self.post(lambda now_s: self._found(checkpoint, error, now_s))

        self._checkpointer.find(find.lost, told)

    def _found(self, checkpoint: Checkpoint | None, error: str, now_s: float) -> None:
        resume = ResumePoint(checkpoint) if checkpoint is not None else None
        if self.program.found(Found(resume=resume, error=error), now_s):
            # Where several servers were lost at once, the first answer counts: the second may come while it is used.
            self._commander.resume = checkpoint

    def _mark_best(self, mark: MarkBest) -> None:
        try:
            self._checkpointer.store.mark_best(mark.step, mark.metrics)
        except CheckpointError as error:
            self._reporter.event("best", f"step {mark.step} is best, but can't be kept: {error}", "warning", {})

    def _figures(self, now_s: float) -> None:
        state = self.program.state
        # An asynchronous job does not go back as a whole.
        anew = state.timeline != self._reported if state.sync else not self._reported
        under_way = state.phase in (Phase.RUNNING, Phase.STOPPING) and not state.returning
        if under_way and anew and state.job is not None:
            self._reported = state.timeline
            # Of an earlier chief, whose logs go on: nothing that they have was undone.
            taken_over = state.timeline >> 32 != state.settings.term
            self._reporter.begin(
                replicas=state.job.replicas,
                sync=state.sync,
                timeline=state.timeline,
                first_step=state.step if taken_over else state.base_step,
            )
        if now_s < self._next_rates_s:
            return
        self._next_rates_s = now_s + RATES_S
        if state.running_s is not None and not state.ended:
            self._reporter.rates(state.step, _wire(state.traffic), now_s)
        self._show(now_s)
        if state.ended:
            return
        if self._targets is None:
            chief = state.settings.chief_address
            self._targets = Targets(self._out, chief=chief, chief_metrics=self._metrics.address)
        self._targets.show(state.members)
        counts: dict[tuple[str, str], int] = {}
        for member in state.members:
            for life in Life:
                key = (member.role, life.value)
                counts[key] = counts.get(key, 0) + (member.state is life)
        for (role, life_name), count in counts.items():
            self._metrics.gauge("shardline_tasks", role=role, state=life_name).set(count)

    def _show(self, now_s: float) -> None:
        if self._on_status is not None:
            self._on_status(self._overview(now_s))

    # The end

    def _resign(self) -> None:
        """Leave everything to the chief that leads now: no summary, no orders, no commands."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.resigned = True

    def _finish(self, finish: Finish) -> None:
        if finish.resigned:
            self._resign()
            return
        watched = time.monotonic() - self._asked_s < WATCHER_S
        # Tasks hear of the end before a ps goes, or they would take its going for a fault; and before the digest, which
        # takes its time with a large model.
        self._push_orders()
        self._commander.stop_all(finish.reason)
        self._show(time.monotonic())
        if self._targets is not None:
            self._targets.clear()
        store: CheckpointStore = self._checkpointer.store
        digest = ""
        if self.program.state.checkpoint_step >= 0:
            try:
                digest = parameters_digest(store.open(self.program.state.checkpoint_step, verify=False))
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


def _wire(traffic: Mapping[str, Traffic]) -> dict[str, tuple[int, int]]:
    # Within one host nothing is on a wire; then what moved through memory is the rate to show.
    return {
        task: (both.push_wire_bytes or both.push_raw_bytes, both.pull_wire_bytes or both.pull_raw_bytes)
        for task, both in traffic.items()
    }


def _settle(future: Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Give a waiting call its outcome; it may have gone meanwhile."""
    try:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except InvalidStateError:
        log.debug("a call went away before its answer came")
