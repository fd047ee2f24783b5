"""A chief that dies around failovers: the next one knows what is noted, and asks standbys what they hold.

Noted are the standby of each shard, before a primary is told of another one or of none, and that a history is to
change. Not noted is who is whole, and how far a failover was.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol_model.standbys import Link, Standby, StandbyModel, StandbySetup
from tests.protocol_model.tasks import Shard


@dataclass(frozen=True, kw_only=True)
class ChiefStandbySetup(StandbySetup):
    """A schedule in which chiefs die too."""

    chief_kills: int = 0
    give_ups: int = 0
    """Living standbys that a primary is told to go on without, since they are silent."""
    asks: bool = True
    """The next chief asks the standbys; else it goes back wherever a primary is gone."""


class ChiefStandbyModel(StandbyModel):
    """The synchronous cluster with standbys, under one chief after another."""

    def __init__(self, setup: ChiefStandbySetup) -> None:
        super().__init__(setup)
        self.chief_rules = setup
        self.noted: dict[int, Standby] = {}
        """The journal's standbys, by shard."""
        self.chief_kills, self.give_ups = setup.chief_kills, setup.give_ups
        self.rolling_back = False
        self.taken_over = 0
        """Chiefs that found a primary gone, or a failover half done."""

    def lose(self, shard: Shard) -> None:
        super().lose(shard)
        if shard.status == "blank":
            self.maybe_next_chief(0.5)

    def maybe_next_chief(self, chance: float) -> None:
        if self.chief_kills and self.random.random() < chance:
            self.chief_kills -= 1
            self.next_chief()

    def command(self) -> None:
        if not self.commands and self.give_ups and self.protected and self.random.random() < 0.2:
            self.give_ups -= 1
            shard = self.random.choice(self.shards)
            self.commands = [("alone", shard), ("note", shard)]  # popped from the end
            return
        super().command()
        if not self.commands:
            self.rolling_back = False
            self.noted = dict(self.standbys)
        self.maybe_next_chief(0.3 if self.commands else 0.02)

    def continue_rollback(self) -> None:
        order, shard = self.commands[-1]
        if order not in ("note", "alone"):
            super().continue_rollback()
            return
        self.commands.pop()
        if order == "note":
            self.noted.pop(shard.number, None)
        else:
            # Silent, so the standby does not know.
            self.go_alone(shard)

    def begin_failover(self, blank: list[Shard]) -> None:
        super().begin_failover(blank)
        self.rolling_back = False

    def begin_rollback(self) -> None:
        super().begin_rollback()
        self.noted.clear()
        self.rolling_back = True

    def next_chief(self) -> None:
        """What was under way is forgotten; what is noted and what the servers hold decides."""
        unfinished, self.commands = bool(self.commands), []
        self.standbys = dict(self.noted)
        blank = [shard for shard in self.shards if shard.status == "blank"]
        if self.rolling_back:
            self.begin_rollback()
            return
        there = [self.standbys.get(shard.number) for shard in blank]
        whole = all(standby is not None and standby.synced and not standby.dead for standby in there)
        if blank and not (whole and self.chief_rules.asks):
            self.begin_rollback()
            return
        for shard in self.shards:
            if shard not in blank and self.links[shard].standby is not self.standbys.get(shard.number):
                self.stay_without(shard)
        if blank or unfinished or any(shard.timeline != self.timeline for shard in self.shards):
            self.taken_over += 1
            self.begin_failover(blank)

    def stay_without(self, shard: Shard) -> None:
        """The last chief died between the note and the act, or a standby became the primary since."""
        link, self.links[shard] = self.links[shard], Link()
        self.standbys.pop(shard.number, None)
        self.noted.pop(shard.number, None)
        for items in link.pending.values():
            self.release(shard, items)
