"""A chief that dies around failovers: the next one knows what is noted, and asks standbys what they hold.

Noted are the standby of each shard and the number of its appointment, before a primary is told of another one or of
none, and that a history is to change. Not noted is who is whole, and how far a failover was. A server that was given up
may hear nothing of it, take itself to be whole, and be appointed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol_model.numbers import require
from tests.protocol_model.standbys import Link, Standby, StandbyModel, StandbySetup
from tests.protocol_model.tasks import Shard


@dataclass(frozen=True, kw_only=True)
class ChiefStandbySetup(StandbySetup):
    """A schedule in which chiefs die too."""

    chief_kills: int = 0
    give_ups: int = 0
    """Living standbys that a primary is told to go on without, since they are silent."""
    both_die: int = 0
    """Times that a primary and the chief die when an appointment is noted and the standby not told. Needs rollbacks."""
    asks: bool = True
    """The next chief asks the standbys; else it goes back wherever a primary is gone."""
    appointments: bool = True
    """A standby is believed where it was copied for the appointment that is noted; else wherever it is noted."""


class ChiefStandbyModel(StandbyModel):
    """The synchronous cluster with standbys, under one chief after another."""

    def __init__(self, setup: ChiefStandbySetup) -> None:
        super().__init__(setup)
        self.chief_rules = setup
        self.noted: dict[int, Standby] = {}
        """The journal's standbys, by shard."""
        self.unheard: set[int] = set()
        """Shards that the journal gives a standby which it has not been told of: what is there was copied before."""
        self.given_up: dict[int, Standby] = {}
        """Standbys that do not know that they are none any more."""
        self.chief_kills, self.give_ups = setup.chief_kills, setup.give_ups
        self.both_die = setup.both_die
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
        again = [shard for shard in self.shards if shard.number in self.given_up.keys() - self.standbys.keys()]
        if not self.commands and again and not any(shard.lost for shard in self.shards) and self.random.random() < 0.3:
            shard = self.random.choice(again)
            self.commands = [("tell", shard), ("appoint", shard)]
            return
        super().command()
        if not self.commands:
            self.rolling_back = False
            self.note()
        self.maybe_next_chief(0.3 if self.commands else 0.02)

    def continue_rollback(self) -> None:
        order, shard = self.commands[-1]
        acts = {"note": self.note_none, "alone": self.give_up, "appoint": self.appoint, "tell": self.tell}
        if order not in acts:
            super().continue_rollback()
            return
        self.commands.pop()
        acts[order](shard)

    def note(self) -> None:
        self.noted = dict(self.standbys)
        self.unheard.clear()

    def note_none(self, shard: Shard) -> None:
        self.noted.pop(shard.number, None)

    def give_up(self, shard: Shard) -> None:
        """Silent, so the standby does not know."""
        if shard.number in self.standbys:
            self.given_up[shard.number] = self.standbys[shard.number]
        self.go_alone(shard)

    def appoint(self, shard: Shard) -> None:
        """The same server again: the journal first."""
        self.noted[shard.number] = self.given_up[shard.number]
        self.unheard.add(shard.number)
        if self.both_die and self.random.random() < 0.5:
            self.both_die -= 1
            self.lose(shard)
            self.next_chief()

    def tell(self, shard: Shard) -> None:
        """The server hears of it, forgets what it held, and is copied anew."""
        old = self.given_up.pop(shard.number, None)
        if old is None or shard.status == "blank":
            return
        old.closed = True
        standby = self.standbys[shard.number] = Standby(self.setup, shard.number)
        standby.dead = old.dead
        self.links[shard] = Link(standby=standby)
        self.noted[shard.number] = standby
        self.unheard.discard(shard.number)

    def promote(self, shard: Shard) -> None:
        standby = self.standbys[shard.number]
        before = next(old for old in reversed(self.old) if old.number == shard.number)
        if standby.synced:
            behind = [bucket.number for bucket in before.buckets if standby.buckets[bucket.number].step < bucket.step]
            require(not behind, f"a standby of shard {shard.number} was promoted that is behind in buckets {behind}")
        super().promote(shard)

    def begin_failover(self, blank: list[Shard]) -> None:
        super().begin_failover(blank)
        self.rolling_back = False

    def begin_rollback(self) -> None:
        super().begin_rollback()
        self.noted.clear()
        self.unheard.clear()
        self.given_up.clear()
        self.rolling_back = True

    def next_chief(self) -> None:
        """What was under way is forgotten; what is noted and what the servers hold decides."""
        unfinished, self.commands = bool(self.commands), []
        self.standbys = dict(self.noted)
        if self.chief_rules.appointments:
            for number in self.unheard:
                del self.standbys[number]
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
