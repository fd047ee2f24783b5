"""Keeps the journal's list of members and finished tasks up to date, ahead of the actions that depend on it. Pure."""

from __future__ import annotations

from shardline_chief.rules.actions import Action, JournalLine
from shardline_chief.rules.replay import Remembered
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
