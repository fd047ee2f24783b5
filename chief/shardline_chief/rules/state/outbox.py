"""What the chief has decided to do, in order, and which answers of servers it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.core.waiting import Waiting
from shardline.errors import ProtocolError
from shardline_chief.rules.actions import (
    Action,
    Answer,
    AskStatus,
    Command,
    CommandResult,
    Cut,
    JournalLine,
    Order,
    Say,
    Tell,
)
from shardline_chief.rules.continuations import After
from shardline_chief.rules.state.layout import JobLayout


@dataclass(frozen=True, kw_only=True)
class Pending:
    """An order that not every server has answered yet."""

    order: Order
    then: After | None
    timeline: int
    """In which it was given."""


class Outbox:
    """Actions that were decided and not taken yet, and orders under way."""

    def __init__(self, layout: JobLayout) -> None:
        self.actions: list[Action] = []
        self._layout = layout
        self._pending: dict[int, Pending] = {}
        self._commands = 0
        self._asking = False
        self._waiting: Waiting | None = None
        """What was told of the wait for tasks; the next wait of a job begins where it stopped."""

    def tell_wait(self, now_s: float, deadline_s: float, whom: str) -> None:
        """Say in the chief's log for whom it waits and how long still, as often as is of use."""
        if self._waiting is None:
            self._waiting = Waiting(now_s, deadline_s)
        self._waiting.deadline_s = deadline_s
        if sentence := self._waiting.sentence(now_s, whom):
            self.actions.append(Tell(sentence=sentence))

    def say(self, kind: str, sentence: str, level: str, fields: Mapping[str, Any]) -> None:
        """Tell the person."""
        self.actions.append(Say(kind=kind, sentence=sentence, level=level, fields=fields))

    def record(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Note a decision in the journal before the acts that follow."""
        self.actions.append(JournalLine(kind=kind, fields=fields))

    def answer(self, ticket: Any, value: Any) -> None:
        """Reply to a waiting call."""
        self.actions.append(Answer(ticket=ticket, value=value))

    def command(self, order: Order, then: After | None) -> None:
        """Order every ps; `then` follows once all have answered."""
        self._commands += 1
        self._pending[self._commands] = Pending(order=order, then=then, timeline=self._layout.timeline)
        self.actions.append(Command(number=self._commands, order=order))

    def ask_status(self) -> None:
        """Ask every ps for its status, unless such a question is on its way; answers come as if they were beats."""
        if not self._asking:
            self._asking = True
            self.command(AskStatus(), None)

    def answered(self, number: int, result: CommandResult) -> tuple[Pending, CommandResult]:
        """What a command was that came back from every ps, and the answers that matter."""
        pending = self._pending.pop(number)
        if isinstance(pending.order, AskStatus):
            self._asking = False
        if isinstance(pending.order, Cut):
            # A server that holds no shard, such as one that came back and is not configured yet, has nothing to cut.
            holders = {place.task for place in self._layout.placement}
            errors = {
                task: error
                for task, error in result.errors.items()
                if task in holders or not isinstance(error, ProtocolError)
            }
            result = CommandResult(values=result.values, errors=errors)
        return pending, result
