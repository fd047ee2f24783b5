"""Actions that have been decided, in order, and orders that servers have yet to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardline.core.waiting import Waiting
from shardline.errors import ProtocolError
from shardline_chief.rules.actions import Action, Answer, AskStatus, Command, CommandResult, Cut, Order, Tell
from shardline_chief.rules.state.layout import JobLayout


@dataclass(frozen=True, kw_only=True)
class Pending:
    """An order that not every server has answered yet."""

    order: Order
    timeline: int
    """Timeline in which it was given."""


class Outbox:
    """Actions not taken yet, and orders in flight."""

    def __init__(self, layout: JobLayout) -> None:
        self.actions: list[Action] = []
        self._layout = layout
        self._pending: dict[int, Pending] = {}
        self._commands = 0
        self._asking = False
        self._waiting: Waiting | None = None
        """The log of the current wait for tasks; the job's next wait continues it."""

    def tell_wait(self, now_s: float, deadline_s: float, whom: str) -> None:
        """Log which tasks the chief waits for and the time left, at useful intervals."""
        if self._waiting is None:
            self._waiting = Waiting(now_s, deadline_s)
        self._waiting.deadline_s = deadline_s
        if sentence := self._waiting.sentence(now_s, whom):
            self.actions.append(Tell(sentence=sentence))

    def answer(self, ticket: Any, value: Any) -> None:
        self.actions.append(Answer(ticket=ticket, value=value))

    def command(self, order: Order) -> int:
        """Send an order to every ps; returns its number, which the event OrderAnswered has once all have answered."""
        self._commands += 1
        self._pending[self._commands] = Pending(order=order, timeline=self._layout.timeline)
        self.actions.append(Command(number=self._commands, order=order))
        return self._commands

    def ask_status(self) -> None:
        """Ask every ps for its status, unless such a request is in flight; answers are treated like heartbeats."""
        if not self._asking:
            self._asking = True
            self.command(AskStatus())

    def answered(self, number: int, result: CommandResult) -> tuple[Pending, CommandResult]:
        """The order that a completed command carried, and the answers that matter."""
        pending = self._pending.pop(number)
        if isinstance(pending.order, AskStatus):
            self._asking = False
        if isinstance(pending.order, Cut):
            # A server without shards, such as one that was restarted and is not configured yet, has nothing to cut.
            holders = {place.task for place in self._layout.placement}
            errors = {
                task: error
                for task, error in result.errors.items()
                if task in holders or not isinstance(error, ProtocolError)
            }
            result = CommandResult(values=result.values, errors=errors)
        return pending, result
