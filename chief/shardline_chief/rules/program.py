"""The chief's decisions: events go in, actions come out. No threads, no sockets, no clock of its own.

program = Program(settings, now_s, job=spec, resume=None)
program.beat(beat, now_s)
for action in program.take(): ...        # control.py carries it out and reports the outcome: done(), saved()
orders = program.orders("worker/0")      # what that task is to do now

All methods are called from one thread. The tables in machine.py say what follows from each event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.codecs.auto import CodecSpeed
from shardline.core.orders import JobView, Orders
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.core.status import PsStatus, Standstill, TaskStatus
from shardline.errors import ProtocolError
from shardline_chief.rules import admission, credible, views
from shardline_chief.rules.actions import Action, CommandResult, Found, JournalLine, Saved
from shardline_chief.rules.events import (
    CheckpointFound,
    CheckpointSaved,
    CodecsMeasured,
    EndAsked,
    OrderAnswered,
    Progressed,
    ServerLost,
    Stage,
    StrangerLost,
    Tick,
    TrainerLost,
)
from shardline_chief.rules.flows.barriers import Barriers
from shardline_chief.rules.heartbeats import Heartbeats
from shardline_chief.rules.machine import Flows, Machine
from shardline_chief.rules.messages import Beat, Join, LeaseAnswer, MoveAnswer, PlaceAnswer
from shardline_chief.rules.replay import Remembered
from shardline_chief.rules.standstill import Motion, note_motion, standstill
from shardline_chief.rules.state.checkpoints import Resume
from shardline_chief.rules.state.membership import Life
from shardline_chief.rules.state.settings import ChiefSettings
from shardline_chief.rules.state.state import State


class MemberJournal:
    """Writes changes of the members to the journal, event by event."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._members: dict[str, int] = {}
        """Members according to the journal: incarnation by task."""
        self._finished: set[str] = set()
        self._told = 0
        """Number of actions that earlier events have already queued."""

    def remember(self, remembered: Remembered) -> None:
        """Set what the journal of an earlier chief contains."""
        self._members = {task: known.incarnation for task, known in remembered.members.items()}
        self._finished = set(remembered.finished)

    def take(self) -> list[Action]:
        """The pending actions in order, journal entries included; each is returned once."""
        self.note()
        actions, self.state.outbox.actions = self.state.outbox.actions, []
        self._told = 0
        return actions

    def note(self) -> None:
        """Call after each event: record who joined, left or finished, before the actions that the event caused."""
        state = self.state
        living = {member.task: member for member in state.tasks.members if member.living}
        lives = {task: member.incarnation for task, member in living.items()}
        if lives != self._members or state.tasks.finished != self._finished:
            records = [
                JournalLine(
                    kind="gone",
                    fields={
                        "task": task,
                        "incarnation": incarnation,
                        "figures": dict(state.figures.lives.get((task, incarnation), {})),
                    },
                )
                for task, incarnation in self._members.items()
                if lives.get(task) != incarnation
            ]
            records += [
                JournalLine(
                    kind="member",
                    fields={
                        "task": member.task,
                        "incarnation": member.incarnation,
                        "stable_id": member.stable_id,
                        "address": member.address,
                        "metrics_address": member.metrics_address,
                        "device": member.device,
                        "key": member.key.hex(),
                    },
                )
                for member in living.values()
                if self._members.get(member.task) != member.incarnation
            ]
            if state.tasks.finished != self._finished:
                records.append(JournalLine(kind="finished", fields={"tasks": sorted(state.tasks.finished)}))
            state.outbox.actions[self._told : self._told] = records
            self._members, self._finished = lives, set(state.tasks.finished)
        self._told = len(state.outbox.actions)


class Program:
    """One job, from the first Join to the end of the last task."""

    def __init__(
        self,
        settings: ChiefSettings,
        now_s: float,
        *,
        job: JobSpec | None = None,
        resume: Resume | None = None,
        remembered: Remembered | None = None,
        trained_s: float = 0.0,
    ) -> None:
        """remembered: the job to take over from another chief. trained_s: seconds since its training began."""
        self.state = State(settings, now_s, resume=resume)
        self.motion = Motion(settings.timeouts.heartbeat_s)
        self.flows = Flows(self.state)
        self.machine = Machine(self.state, self.flows)
        self.barriers = Barriers(self.state)
        self.heartbeats = Heartbeats(self.state, self.flows, self.machine, self.barriers)
        self.member_journal = MemberJournal(self.state)
        self._posts: tuple[Post, ...] = ()
        if remembered is not None:
            self.flows.takeover.begin(remembered, now_s, trained_s)
            self.member_journal.remember(remembered)
        if job is not None and self.state.job is None:
            self.flows.start.adopt(job, "the job file")

    def take(self) -> list[Action]:
        """The pending actions in order; each is returned once."""
        return self.member_journal.take()

    def note(self) -> None:
        """Call after each event: record who joined, left or finished, before the actions that the event caused."""
        self.member_journal.note()

    # Tasks

    def join(self, ticket: Any, join: Join, now_s: float) -> None:
        """A task asks to join; the answer may come later, once every ps has it in its table (F4)."""
        refused = admission.refusal(self.state, join)
        if refused is None and (restarted := self.flows.joining.replaces(join)) is not None:
            self.machine.handle(restarted, now_s)
        self.flows.joining.join(ticket, join, refused, now_s)
        self.machine.settle(now_s)

    def place(self, role: str, address: str, now_s: float) -> PlaceAnswer:
        """An index for a task that is about to join from this address, reserved for it for --timeout."""
        return self.flows.joining.place(role, address, now_s)

    def beat(self, beat: Beat, now_s: float) -> bool:
        """Take in a heartbeat. False: its incarnation is fenced or unknown; its stream gets fenced orders and ends.

        Raises ProtocolError, and changes nothing, if a living task says what can't be; see credible.py.
        """
        if self.state.tasks.members.current(beat.task, beat.incarnation):
            try:
                credible.beat(self.state, beat)
            except ProtocolError as error:
                self.heartbeats.refused(beat.task, error)
                raise
        if not self.heartbeats.beat(beat, now_s):
            return False
        self._progress(now_s)
        return True

    def stream_broken(self, task: str, incarnation: int, now_s: float) -> None:
        if self.heartbeats.stream_broken(task, incarnation):
            self.lives(now_s)

    # Time

    def tick(self, now_s: float) -> None:
        """Time has passed: call about ten times a second."""
        self.lives(now_s)
        self.machine.handle(Tick(), now_s)
        self._progress(now_s)
        note_motion(self.state, self.motion, now_s)

    def lives(self, now_s: float) -> None:
        """Declare tasks suspect, then dead, if they were silent for too long."""
        state = self.state
        if state.ended:
            return
        for change in state.tasks.members.tick(now_s):
            member = change.member
            if member.living and member.trains and self.heartbeats.has_failed(member):
                # Its failure was already reported; that it is silent now is no news.
                continue
            if member.living:
                level = "info" if member.state is Life.ALIVE else "warning"
                state.say("life", change.sentence, level, task=member.task, state=member.state.value)
            elif member.row.holds:
                self.machine.handle(ServerLost(member.task, change.sentence), now_s)
            elif member.talks and state.layout.table_sent:
                self.machine.handle(TrainerLost(member, change.sentence), now_s)
            else:
                self.machine.handle(StrangerLost(member, change.sentence), now_s)
            if state.ended:
                return

    def _progress(self, now_s: float) -> None:
        self.machine.handle(Progressed(), now_s)

    # Outcomes of actions

    def done(self, number: int, result: CommandResult, now_s: float) -> None:
        """A command was answered by every ps: handle failures, then continue."""
        state = self.state
        for task, value in result.values.items():
            if isinstance(value, PsStatus):
                self.flows.servers.told(task, value, asked=True)
                self.machine.settle(now_s)
        pending, result = state.outbox.answered(number, result)
        current = pending.timeline == state.layout.timeline and not state.ended
        self.machine.handle(OrderAnswered(number, pending.order, result, current), now_s)
        if result.errors:
            self.flows.servers.failed(pending, result.errors)
            self.machine.settle(now_s)
        self._progress(now_s)

    def saved(self, saved: Saved, now_s: float) -> None:
        """A checkpoint was committed, or could not be written."""
        self.machine.handle(CheckpointSaved(saved), now_s)
        self._progress(now_s)

    def found(self, found: Found, now_s: float) -> bool:
        """The checkpoint to roll back to after a loss; False if it is no longer wanted."""
        wanted = self.state.stage is Stage.FINDING
        self.machine.handle(CheckpointFound(found), now_s)
        return wanted

    def measured(self, speeds: Mapping[str, CodecSpeed], now_s: float) -> None:
        self.machine.handle(CodecsMeasured(speeds), now_s)
        self._progress(now_s)

    def fatal(self, exit_code: int, reason: str, now_s: float) -> None:
        """End the job: the chief itself can no longer be trusted."""
        self.state.end(exit_code, reason, now_s)

    # Questions

    def stop(self, reason: str, now_s: float) -> int:
        """End the job with a checkpoint; returns the stop step, 0 if it is not known yet."""
        self.machine.handle(EndAsked(f"stopped: {reason}"), now_s)
        return self.flows.ending.stop_step

    def move(self, task: str, number: int, now_s: float) -> MoveAnswer:
        """Move the shards of a server, or even them out; number: of an earlier request, to learn how it goes."""
        moving = self.flows.failover.moving
        answer = moving.told(number) if number else moving.ask(task, now_s)
        self._progress(now_s)
        return answer

    def lease(self, task: str, incarnation: int, done: tuple[int, ...], now_s: float) -> LeaseAnswer:
        """Batches to train on next, if the chief hands them out."""
        answer = self.flows.leasing.lease(task, incarnation, done)
        self._progress(now_s)
        return answer

    def report(
        self, task: str, incarnation: int, step: int, metrics: Mapping[str, float], failure: str, now_s: float
    ) -> bool:
        """Take in a checkpoint's score; returns whether it is the best so far. Raises FencedError if not a member."""
        best = self.flows.scoring.report(task, incarnation, step, metrics, failure)
        self._progress(now_s)
        return best

    def job_view(self) -> JobView:
        """Job, plan and placement. Raises UsageError while they are not known yet."""
        return views.job_view(self.state)

    def orders(self, task: str, incarnation: int) -> Orders:
        return self.all_orders().of(task, incarnation)

    def all_orders(self) -> views.AllOrders:
        """The current orders for all tasks, while nothing happens."""
        held = views.posts(self.state)
        if held != self._posts:
            # Kept as it is otherwise: that two orders have the same posts is then seen without looking at them.
            self._posts = held
        return views.AllOrders(self.state, self.barriers, self._posts)

    def rows(self, now_s: float) -> tuple[TaskStatus, ...]:
        return views.rows(self.state, now_s)

    def standstill(self, now_s: float) -> Standstill | None:
        """Since when the job has not moved, and for whom it waits; None while it moves."""
        return standstill(self.state, self.motion, now_s)
