"""Who is a member and who is done, as the journal has it: what changed is noted before what follows from it. Pure."""

from __future__ import annotations

from shardline_chief.rules.actions import Action, JournalLine
from shardline_chief.rules.replay import Remembered
from shardline_chief.rules.state.membership import Member
from shardline_chief.rules.state.state import State


class MemberJournal:
    """Keeps the journal's list of members up with the job's, event by event."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._members: dict[str, int] = {}
        """Lives that the journal has as members."""
        self._finished: set[str] = set()
        self._told = 0
        """Actions of earlier events."""

    def remember(self, remembered: Remembered) -> None:
        """The journal of an earlier chief has these."""
        self._members = {task: known.incarnation for task, known in remembered.members.items()}
        self._finished = set(remembered.finished)

    def take(self) -> list[Action]:
        """What to do now, in order, notes included; each is given out once."""
        self.note()
        actions, self.state.outbox.actions = self.state.outbox.actions, []
        self._told = 0
        return actions

    def note(self) -> None:
        """After each event: note who came, who went and who is done, before what the event made to be done."""
        state = self.state
        living = {member.task: member for member in state.tasks.members if member.living}
        lives = {task: member.incarnation for task, member in living.items()}
        if lives != self._members or state.tasks.finished != self._finished:
            records = [
                JournalLine(kind="gone", fields={"task": task, "incarnation": incarnation})
                for task, incarnation in self._members.items()
                if lives.get(task) != incarnation
            ]
            records += [
                _admission(member) for member in living.values() if self._members.get(member.task) != member.incarnation
            ]
            if state.tasks.finished != self._finished:
                records.append(JournalLine(kind="finished", fields={"tasks": sorted(state.tasks.finished)}))
            state.outbox.actions[self._told : self._told] = records
            self._members, self._finished = lives, set(state.tasks.finished)
        self._told = len(state.outbox.actions)


def _admission(member: Member) -> JournalLine:
    return JournalLine(
        kind="member",
        fields={
            "task": member.task,
            "incarnation": member.incarnation,
            "stable_id": member.stable_id,
            "address": member.address,
            "metrics_address": member.metrics_address,
            "key": member.key.hex(),
        },
    )
