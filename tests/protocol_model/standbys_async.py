"""Standbys of asynchronous shards: nothing that was acknowledged is lost with a ps, and nothing counts twice.

A push is applied to all buckets of its shard at once, and is one record. Answers of any kind wait until the standby
has acknowledged the newest record that they contain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shardline.core.outcome import Outcome
from tests.protocol_model.asynchronous import AsyncMessage, AsyncModel, AsyncSetup, AsyncShard, Record
from tests.protocol_model.numbers import require

BUCKETS = 3
Table = dict[int, tuple[int, int, Outcome]]


@dataclass(frozen=True, kw_only=True)
class AsyncStandbySetup(AsyncSetup):
    """A schedule with standbys; shard_losses: primaries that are lost. Then the rules, each of which can be broken."""

    standby_losses: int = 0
    hold: bool = True
    """Answers wait for the standby."""
    fenced_records: bool = True
    """A promoted standby acknowledges no record of the primary before it."""
    table: bool = True
    """The mark that all buckets are copied brings the table of sequence numbers."""


class AsyncEntry(NamedTuple):
    """One record: the beginning of a copy, one bucket's image, the mark that all are copied, or a push."""

    n: int
    begins: bool = False
    image: tuple[int, tuple[Record, ...]] | None = None
    mark: tuple[tuple[Record, ...], Table] | None = None
    push: tuple[Record, tuple[int, ...]] | None = None
    """With the buckets that were copied before."""


class Answer(NamedTuple):
    message: AsyncMessage
    outcome: Outcome
    record: int
    """The newest record that it contains."""


@dataclass
class AsyncStandby:
    """Each bucket's history, and the table. synced: it is whole."""

    record: int = 0
    buckets: dict[int, list[Record]] = field(default_factory=dict)
    history: list[Record] = field(default_factory=list)
    last: Table = field(default_factory=dict)
    synced: bool = False
    closed: bool = False

    def take(self, entry: AsyncEntry) -> None:
        require(entry.n == self.record + 1, f"record {entry.n} came after {self.record}")
        self.record = entry.n
        if entry.begins:
            self.buckets, self.synced = {}, False
        if entry.image is not None:
            self.buckets[entry.image[0]] = list(entry.image[1])
        if entry.mark is not None:
            self.history, self.last = list(entry.mark[0]), dict(entry.mark[1])
            self.synced = True
        if entry.push is not None:
            record, copied = entry.push
            for number in copied:
                self.buckets[number].append(record)
            if self.synced:
                self.history.append(record)
                outcome = Outcome.APPLIED if record.applied else Outcome.SKIPPED
                self.last[record.worker] = (record.incarnation, record.seq, outcome)


@dataclass
class AsyncPrimary:
    """One life of a primary: its shard's state, its stream, and the answers that wait."""

    shard: AsyncShard
    standby: AsyncStandby | None = None
    sent: int = 0
    acked: int = 0
    entries: deque[AsyncEntry] = field(default_factory=deque)
    acks: deque[int] = field(default_factory=deque)
    copied: list[int] = field(default_factory=list)
    begun: bool = False
    marked: bool = False
    answers: list[Answer] = field(default_factory=list)

    def append(self, entry: AsyncEntry) -> None:
        self.sent = entry.n
        self.entries.append(entry)


class AsyncStandbyModel(AsyncModel):
    """run() plays one schedule; one ps is lost at a time."""

    def __init__(self, setup: AsyncStandbySetup) -> None:
        super().__init__(setup)
        self.rules = setup
        self.primaries = {shard.number: AsyncPrimary(shard) for shard in self.shards}
        self.old: list[AsyncPrimary] = []
        """Cut off from the chief, and alive."""
        self.standby_losses = setup.standby_losses

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.35:
            self.replicate(self.random.choice([*self.primaries.values(), *self.old]))
        elif dice < 0.5:
            self.tell(self.random.choice([*self.primaries.values(), *self.old]))
        elif dice < 0.505 and self.standby_losses:
            self.standby_losses -= 1
            self.lose_standby(self.random.choice(list(self.primaries.values())))
        else:
            super().act()

    def lose(self, shard: AsyncShard) -> None:
        """The primary is lost with what only it holds; its standby takes over."""
        primary = self.primaries[shard.number]
        if primary.standby is None or not primary.standby.synced:
            self.shard_losses += 1
            return
        for _ in range(self.random.randrange(6)):  # what is on the wire may still come
            self.replicate(primary)
        standby = primary.standby
        for number in range(BUCKETS):
            require(standby.buckets[number] == standby.history, f"bucket {number} of a whole standby lacks pushes")
        old = AsyncShard(shard.number, shard.timeline, list(shard.history), dict(shard.last))
        primary.shard = old
        if self.random.random() < 0.6:
            self.old.append(primary)
        standby.closed = True
        shard.history, shard.last = standby.history, standby.last
        shard.timeline += 1
        self.primaries[shard.number] = AsyncPrimary(shard)
        self.counts.promotions += 1

    def lose_standby(self, primary: AsyncPrimary) -> None:
        """The chief lets the primary go on alone."""
        if primary.standby is not None:
            self.primaries[primary.shard.number] = AsyncPrimary(primary.shard, answers=primary.answers)
            primary.standby.closed = True
            self.primaries[primary.shard.number].answers = [a._replace(record=0) for a in primary.answers]

    # A primary.

    def deliver(self) -> None:
        n = self.random.randrange(len(self.net))
        message = self.net[n]
        if self.random.random() < 0.7:
            self.net[n] = self.net[-1]
            self.net.pop()
        number = message.sender.shard
        found = [old for old in self.old if old.shard.number == number and old.shard.timeline == message.timeline]
        primary = self.random.choice([*found, self.primaries[number]])
        current, self.shards[number] = self.shards[number], primary.shard
        before = len(primary.shard.history)
        outcome, _ = self.admit(message)
        self.shards[number] = current
        if len(primary.shard.history) > before and primary.copied:
            record = primary.shard.history[-1]
            primary.append(AsyncEntry(primary.sent + 1, push=(record, tuple(primary.copied))))
        held = primary.sent if self.rules.hold and primary.marked else 0
        # The oldest are lost.
        primary.answers = [*primary.answers[-5:], Answer(message, outcome, held)]

    def tell(self, primary: AsyncPrimary) -> None:
        """Send an answer whose records the standby has."""
        ready = [answer for answer in primary.answers if answer.record <= primary.acked]
        if ready:
            answer = self.random.choice(ready)
            primary.answers.remove(answer)
            self.answer(answer.message, answer.outcome)

    def replicate(self, primary: AsyncPrimary) -> None:
        """One action of a primary and its standby, or of the wire between them."""
        standby = primary.standby
        dice = self.random.random()
        if standby is None:
            if primary not in self.old and dice < 0.3:
                primary.standby = AsyncStandby()
                primary.append(AsyncEntry(1, begins=True))
        elif dice < 0.4 and primary.entries:
            entry = primary.entries.popleft()
            if not standby.closed:
                standby.take(entry)
                primary.acks.append(entry.n)
            elif not self.rules.fenced_records:
                primary.acks.append(entry.n)
        elif dice < 0.8 and primary.acks:
            primary.acked = primary.acks.popleft()
            primary.begun = True
        elif primary.begun and not primary.marked:
            self.copy_one(primary)

    def copy_one(self, primary: AsyncPrimary) -> None:
        left = [number for number in range(BUCKETS) if number not in primary.copied]
        if left:
            number = self.random.choice(left)
            primary.append(AsyncEntry(primary.sent + 1, image=(number, tuple(primary.shard.history))))
            primary.copied.append(number)
            return
        last = dict(primary.shard.last) if self.rules.table else {}
        primary.append(AsyncEntry(primary.sent + 1, mark=(tuple(primary.shard.history), last)))
        primary.marked = True
