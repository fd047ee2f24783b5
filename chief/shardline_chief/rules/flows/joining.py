"""A task asks to join, and is admitted once every server knows it (F4)."""

from __future__ import annotations

from typing import Any

from shardline.security import key_of
from shardline_chief.rules import admission
from shardline_chief.rules.events import Arrived, Known, ServerLost
from shardline_chief.rules.flows.start import Start
from shardline_chief.rules.flows.takeover import Takeover
from shardline_chief.rules.messages import Join, JoinAnswer, PlaceAnswer
from shardline_chief.rules.state.membership import Life, Member, Refused
from shardline_chief.rules.state.state import State


class Joining:
    def __init__(self, state: State, start: Start, takeover: Takeover) -> None:
        self.state = state
        self.start = start
        self.takeover = takeover
        self._refusals = admission.Refusals()

    def place(self, role: str, address: str, now_s: float) -> PlaceAnswer:
        """An index for a task that is about to join from this address, reserved for it for --timeout."""
        state = self.state
        refused = admission.place_refusal(role)
        if refused is None and state.ended and state.exit_code:
            refused = Refused(reason=f"the job has ended: {state.reason}", retry=True)
        if refused is None:
            limit, keep_s = admission.limit(state, role, named=False), state.timeouts.lost_s
            found = state.tasks.members.place(now_s, role, address, limit=limit, keep_s=keep_s)
            if not isinstance(found, Refused):
                return PlaceAnswer(task=f"{role}/{found}")
            refused = found
        return PlaceAnswer(reason=refused.reason, retry=refused.retry)

    def replaces(self, join: Join) -> ServerLost | None:
        """The event if a new process replaces a silent server, whose shards are lost; None otherwise."""
        if join.role != "ps":
            return None
        old = next((m for m in self.state.tasks.members if m.role == "ps" and m.index == join.index), None)
        if old is None or old.state is not Life.SUSPECT:
            return None
        if old.stable_id == join.stable_id:
            self.takeover.heard(old.task)
            return None
        return ServerLost(old.task, f"{old.task} was restarted and is empty", back=True)

    def join(self, ticket: Any, join: Join, refused: Refused | None, now_s: float) -> None:
        """Handle a Join; the answer may come later. refused: why the task may not join, if that is known already."""
        state = self.state
        if refused is None:
            key = key_of(join.secret) if join.secret else b""
            limit = admission.limit(state, join.role, named=join.index is not None)
            decision = state.tasks.members.join(now_s, join, limit=limit, key=key)
            if not isinstance(decision, Refused):
                member, old = decision.member, decision.replaced
                if old is not None:
                    sentence = f"{member.task}: a new process replaces a silent one, which is fenced"
                    state.say("replaced", sentence)
                self._admitted(ticket, join, member, old)
                return
            refused = decision
        if self._refusals.fresh(join.name, refused, now_s):
            state.say("refused", f"{join.name} at {join.address} is not admitted: {refused.reason}", "warning")
        state.outbox.answer(ticket, JoinAnswer(accepted=False, reason=refused.reason, retry=refused.retry))

    def _admitted(self, ticket: Any, join: Join, member: Member, old: Member | None) -> None:
        state, tasks = self.state, self.state.tasks
        self._note(join, member)
        there = len(tasks.members.living(member.role))
        state.say(
            "joined",
            f"{member.task} joined from {member.address or 'an unnamed address'} "
            f"({there} {member.role} of {tasks.expected().get(member.role, 0)})",
            incarnation=member.incarnation,
        )
        answer = JoinAnswer(accepted=True, task=member.task, incarnation=member.incarnation, secret=join.secret)
        # A task that joins after the end learns of it from its orders, and exits.
        if state.ended or not (member.talks and state.layout.table_sent):
            if old is not None:
                # In this timeline no server knows of the old life.
                state.reassign(old.incarnation)
            state.outbox.answer(ticket, answer)
            self._advance()
        elif old is not None and self.start.reconcile.restart_without(old):
            # The servers get a table that includes the new life before anything else.
            state.outbox.answer(ticket, answer)
        else:
            state.after_table.append(Known(ticket, answer, old.incarnation if old is not None else None))

    def _note(self, join: Join, member: Member) -> None:
        """Take in what this Join brings: the job, the machine, and an end to waits for such a task."""
        state, tasks = self.state, self.state.tasks
        if member.trains:
            if state.job is None and join.job is not None:
                self.start.adopt(join.job, member.task)
            if join.machine and not tasks.machine:
                tasks.machine = dict(join.machine)
                state.record("machine", facts=tasks.machine)
            tasks.alone_since_s = None
        if member.row.scores:
            state.figures.lost_scores = ""
        tasks.finished.discard(member.task)

    def admit(self, event: Known, now_s: float) -> None:
        """Every server knows the new life, or is lost: admit it."""
        self.state.outbox.answer(event.ticket, event.answer)
        if self.state.ended:
            return
        self.state.reassign(event.replaced)
        self._advance()

    def _advance(self) -> None:
        self.state.emit(Arrived())
