"""Heartbeats: a task's reports become events, in the order that matters."""

from __future__ import annotations

from shardline.consistency import Clock
from shardline.core.orders import Phase, StepReport
from shardline.errors import InternalError, ProtocolError
from shardline_chief.rules.events import EndAsked, TrainerLost
from shardline_chief.rules.flows.barriers import Barriers
from shardline_chief.rules.machine import Flows, Machine
from shardline_chief.rules.messages import Beat
from shardline_chief.rules.state.membership import Member
from shardline_chief.rules.state.state import State


class Heartbeats:
    def __init__(self, state: State, flows: Flows, machine: Machine, barriers: Barriers) -> None:
        self.state = state
        self._flows = flows
        self._machine = machine
        self._barriers = barriers
        self._told_failures: set[tuple[str, int]] = set()
        self._told_leaving: set[tuple[str, int]] = set()
        self._told_refused: set[str] = set()

    def beat(self, beat: Beat, now_s: float) -> bool:
        """Take in a heartbeat. False: its incarnation is fenced or unknown."""
        state, tasks = self.state, self.state.tasks
        if not tasks.members.heard(beat.task, beat.incarnation, now_s):
            return False
        self._flows.takeover.heard(beat.task)
        member = tasks.members.get(beat.task)
        assert member is not None
        self._note(beat, member)
        if member.trains:
            self._flows.codec_choice.told(beat.task, beat.steps, now_s)
        life = (beat.task, beat.incarnation)
        if beat.failure and life not in self._told_failures:
            self._told_failures.add(life)
            self._failed(beat, member, now_s)
        if beat.ps is not None and member.row.holds:
            self._flows.servers.told(beat.task, beat.ps, asked=False)
            self._machine.settle(now_s)
        if beat.finished and member.trains and beat.task not in tasks.finished:
            tasks.finished.add(beat.task)
            state.outbox.ask_status()
        elif not beat.finished:
            # A rollback gave it more to do.
            tasks.finished.discard(beat.task)
        if beat.leaving and life not in self._told_leaving:
            self._told_leaving.add(life)
            self._leaving(beat.task, now_s)
        return True

    def _note(self, beat: Beat, member: Member) -> None:
        """Take in the facts that cause no event."""
        state, tasks = self.state, self.state.tasks
        tasks.steps[beat.task] = beat.step
        state.figures.traffic[beat.task] = beat.traffic
        state.figures.usage[beat.task] = beat.usage
        state.figures.links[beat.task] = beat.links
        # Workers report nothing about shards, and servers nothing about who is silent.
        if member.trains:
            tasks.suspects[beat.task] = beat.suspects
            if beat.barrier is not None:
                self._barriers.told(beat.task, beat.barrier)
        given = state.chooses_batches or state.work.has_given(beat.incarnation)
        if beat.figures and member.trains and given:
            state.figures.lives[beat.task, beat.incarnation] = beat.figures

    def has_failed(self, member: Member) -> bool:
        """Whether this life has reported why it fails."""
        return (member.task, member.incarnation) in self._told_failures

    def trains(self, beat: Beat) -> bool:
        """Whether the sender is the living task of that name, and one that trains."""
        return self.state.tasks.members.current(beat.task, beat.incarnation, lambda role: role.trains)

    def refused(self, task: str, error: ProtocolError) -> None:
        """A task said what can't be: tell people the first time."""
        if task not in self._told_refused:
            self._told_refused.add(task)
            self.state.say("refused", f"refused the {error}", "warning", task=task)

    @property
    def reached(self) -> int:
        """The highest step that a worker may have finished, as far as the servers have told; a batch with leases.

        Looks at all shards: too much for each of many heartbeats.
        """
        state = self.state
        if state.work.leases is not None:
            return state.work.leases.steps
        # Workers that push for themselves count their own steps, one for each push, skipped or not.
        own = state.mode.clock is Clock.VERSION
        shards = state.progress.shards.values()
        done = (max(shard.version, shard.pushes + shard.skipped_steps if own else 0) for shard in shards)
        return max(state.progress.step_max, max(done, default=0))

    def reported(self, beat: Beat) -> tuple[StepReport, ...]:
        """The step reports in a beat, without those for replicas and batches that its sender was never given."""
        state = self.state
        if not self.trains(beat):
            return ()
        # A restarted chief does not yet know who was given what.
        if state.returning or state.chooses_batches:
            return beat.steps
        replicas = state.job.replicas if state.job is not None else 1
        return tuple(report for report in beat.steps if state.work.covers(beat.incarnation, report, replicas))

    def _failed(self, beat: Beat, member: Member, now_s: float) -> None:
        state = self.state
        if not member.row.needed:
            state.say(member.role, f"{beat.task}: {beat.failure}; training continues without it", "warning")
            # It exits after this, so stop waiting for its scores.
            if member.row.scores:
                state.figures.lost_scores = beat.failure
            state.tasks.members.leave(beat.task)
            return
        code = beat.failure_code or InternalError.exit_code
        self._machine.handle(EndAsked(f"{beat.task}: {beat.failure}", code), now_s)

    def _leaving(self, task: str, now_s: float) -> None:
        """A task was asked to end, and wants to leave."""
        state, members = self.state, self.state.tasks.members
        member = members.get(task)
        if member is None or state.ended:
            return
        if state.phase is Phase.STOPPING and member.row.needed:
            # The common last step needs all other tasks; they are released with the end of the job.
            return
        if why := self._irreplaceable(member):
            self._machine.handle(EndAsked(f"stopped: {task} was asked to end, and {why}"), now_s)
            return
        members.leave(task)
        if member.talks and state.layout.table_sent:
            self._machine.handle(TrainerLost(member, f"{task} is leaving as requested", "info"), now_s)
        elif member.row.holds and not state.begun:
            state.say("left", f"{task} was asked to end before the job began; waiting for another", "warning")
        else:
            nothing = "; it held nothing" if member.row.holds else ""
            state.say("left", f"{task} is leaving as requested{nothing}")

    def _irreplaceable(self, member: Member) -> str:
        """Why the job can't continue without this task, as a phrase; empty if it can."""
        state, task = self.state, member.task
        if member.row.holds:
            holds = any(task in (place.task, place.standby_task) for place in state.layout.placement)
            return "its shards have no other holder" if state.begun and holds else ""
        others = [other for other in state.tasks.trainers() if other.task != task]
        alone = member.trains and (not others or state.script)
        return "no other task can replace it" if alone else ""

    def stream_broken(self, task: str, incarnation: int) -> bool:
        """A heartbeat stream ended. True: without a known reason."""
        state, members = self.state, self.state.tasks.members
        if not members.current(task, incarnation):
            return False
        finished = task in state.tasks.finished
        if state.ended or (finished and state.phase is not Phase.RUNNING):
            members.leave(task)
            return False
        members.stream_broken(task, incarnation)
        if state.script and finished:
            members.leave(task)
        return True
