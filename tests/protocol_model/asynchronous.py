"""Asynchronous pushes (PROTOCOL 1.5): workers, shards and a network that delays, repeats, reorders and loses messages.

A push to each shard stands for itself: sequence numbers are per (incarnation, shard), and a shard that lost its memory
goes back alone, to its last cut with that cut's table of sequence numbers, under a timeline of its own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shardline.consistency import numbered_pushes
from shardline.core.outcome import Decision, Outcome
from tests.protocol_model.numbers import require

LIMIT = 20_000
"""Actions after which a schedule counts as stuck; most take 700."""


@dataclass(frozen=True, kw_only=True)
class AsyncSetup:
    seed: int
    shards: int = 2
    workers: int = 3
    pushes: int = 8
    """Of each worker to each shard."""
    kills: int = 0
    shard_losses: int = 0
    give_up: float = 0.0
    """Chance per action that a push not acknowledged yet is given up, by the same number with skip."""
    window: int = 1
    """Pushes of a worker under way to one shard; the protocol has one."""
    new_timeline: bool = True
    """Whether a shard that goes back does so under a new timeline."""
    admit: Callable[..., Decision] = numbered_pushes.admit_push
    resume: Callable[..., int | None] = numbered_pushes.resume


class Record(NamedTuple):
    """One entry of a shard's history."""

    worker: int
    incarnation: int
    seq: int
    push: int
    applied: bool


@dataclass
class AsyncShard:
    number: int
    timeline: int = 1
    history: list[Record] = field(default_factory=list)
    last: dict[int, tuple[int, int, Outcome]] = field(default_factory=dict)
    """By worker: incarnation, last sequence number, its outcome."""
    cut: tuple[list[Record], dict[int, tuple[int, int, Outcome]]] = field(default_factory=lambda: ([], {}))


@dataclass
class Push:
    """A push of one worker to one shard. skip: its worker has given it up."""

    number: int
    seq: int
    skip: bool = False


@dataclass
class Sender:
    """What one incarnation knows of one shard."""

    worker: int
    incarnation: int
    shard: int
    timeline: int
    left: int
    next_seq: int = 1
    open: list[Push] = field(default_factory=list)


class AsyncMessage(NamedTuple):
    sender: Sender
    timeline: int
    seq: int
    push: int
    skip: bool


@dataclass
class AsyncCounts:
    actions: int = 0
    applied: int = 0
    duplicates: int = 0
    skipped: int = 0
    out_of_sequence: int = 0
    fenced: int = 0
    wrong_timeline: int = 0
    lost_with_shard: int = 0
    promotions: int = 0

    def add(self, other: AsyncCounts) -> None:
        for item in dataclasses.fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class AsyncModel:
    """run() plays one schedule, then compares what workers were told with what shards hold."""

    def __init__(self, setup: AsyncSetup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.counts = AsyncCounts()
        self.shards = [AsyncShard(s) for s in range(setup.shards)]
        self.net: list[AsyncMessage] = []
        self.members = dict.fromkeys(range(setup.workers), 1)
        self.senders = [Sender(w, 1, s, 1, setup.pushes) for w in range(setup.workers) for s in range(setup.shards)]
        self.pushes = 0
        self.told: dict[int, tuple[int, Outcome]] = {}
        """By push: its shard and what its worker was told, APPLIED or SKIPPED."""
        self.rolled_back: set[int] = set()
        """Pushes acknowledged as applied by a shard that later lost its memory: what the protocol doesn't promise."""
        self.kills, self.shard_losses = setup.kills, setup.shard_losses

    def run(self) -> AsyncCounts:
        while any(sender.left or sender.open for sender in self.senders):
            self.counts.actions += 1
            require(self.counts.actions < LIMIT, f"stuck after {LIMIT} actions")
            self.act()
        for message in self.net:  # stragglers
            self.admit(message)
        self.check()
        return self.counts

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.02 and self.kills:
            self.kills -= 1
            self.restart_worker(self.random.randrange(self.setup.workers))
        elif dice < 0.03 and self.shard_losses:
            self.shard_losses -= 1
            self.lose(self.random.choice(self.shards))
        elif dice < 0.06:
            shard = self.random.choice(self.shards)
            shard.cut = (list(shard.history), dict(shard.last))
        elif dice < 0.45 and self.net:
            self.deliver()
        else:
            self.send(self.random.choice(self.senders))

    def restart_worker(self, worker: int) -> None:
        """A new incarnation begins at number 1; what the old one has under way is refused from now on, or lost."""
        self.members[worker] += 1
        for n, sender in enumerate(self.senders):
            if sender.worker == worker:
                fresh = Sender(worker, self.members[worker], sender.shard, 0, sender.left + len(sender.open))
                fresh.timeline = self.shards[sender.shard].timeline
                self.senders[n] = fresh

    def lose(self, shard: AsyncShard) -> None:
        """The shard goes back to its cut, dedupe table included."""
        history, last = shard.cut
        gone = {r.push for r in shard.history if r.applied and r.push in self.told} - {r.push for r in history}
        self.counts.lost_with_shard += len(gone)
        self.rolled_back |= gone
        shard.history, shard.last = list(history), dict(last)
        if self.setup.new_timeline:
            shard.timeline += 1

    def send(self, sender: Sender) -> None:
        if sender.left and len(sender.open) < self.setup.window:
            sender.left -= 1
            self.pushes += 1
            sender.open.append(Push(self.pushes, sender.next_seq))
            sender.next_seq += 1
        if sender.open:
            push = self.random.choice(sender.open)
            push.skip = push.skip or self.random.random() < self.setup.give_up
            self.net.append(AsyncMessage(sender, sender.timeline, push.seq, push.number, push.skip))

    def admit(self, message: AsyncMessage) -> tuple[Outcome, int]:
        """(outcome, last number): what the shard answers, after applying what it admits."""
        sender, shard = message.sender, self.shards[message.sender.shard]
        incarnation, last, old = shard.last.get(sender.worker, (0, 0, Outcome.REFUSED))
        if sender.incarnation != self.members[sender.worker]:
            self.counts.fenced += 1
            return Outcome.FENCED, last
        if message.timeline != shard.timeline:
            self.counts.wrong_timeline += 1
            return Outcome.WRONG_TIMELINE, last
        if incarnation != sender.incarnation:
            last = 0
        outcome = self.setup.admit(message.seq, last_seq=last, skip=message.skip).outcome
        if outcome in (Outcome.APPLIED, Outcome.SKIPPED):
            applied = outcome is Outcome.APPLIED
            shard.history.append(Record(sender.worker, sender.incarnation, message.seq, message.push, applied))
            shard.last[sender.worker] = (sender.incarnation, message.seq, outcome)
            self.counts.applied += applied
            self.counts.skipped += not applied
        elif outcome is Outcome.DUPLICATE:
            self.counts.duplicates += 1
            outcome = old if message.seq == last else Outcome.APPLIED  # older ones: only where nothing is given up
        else:
            self.counts.out_of_sequence += 1
        return outcome, last

    def deliver(self) -> None:
        n = self.random.randrange(len(self.net))
        message = self.net[n]
        if self.random.random() < 0.7:
            self.net[n] = self.net[-1]
            self.net.pop()
        outcome, _ = self.admit(message)
        self.answer(message, outcome)

    def answer(self, message: AsyncMessage, outcome: Outcome) -> None:
        """What its sender makes of the outcome."""
        sender = message.sender
        if self.random.random() < 0.3 or sender not in self.senders or message.timeline != sender.timeline:
            return  # the answer is lost, or too late to matter
        if outcome is Outcome.WRONG_TIMELINE or (outcome is Outcome.OUT_OF_SEQUENCE and self.setup.window == 1):
            self.ask_progress(sender)
        elif outcome in (Outcome.APPLIED, Outcome.SKIPPED):
            for push in sender.open:
                if push.seq == message.seq:
                    self.told[push.number] = (sender.shard, outcome)
            sender.open = [push for push in sender.open if push.seq != message.seq]

    def ask_progress(self, sender: Sender) -> None:
        """Progress after a timeline change: what is still open goes on, or is computed anew."""
        shard = self.shards[sender.shard]
        incarnation, last, _ = shard.last.get(sender.worker, (0, 0, Outcome.REFUSED))
        if incarnation != sender.incarnation:
            last = 0
        sender.timeline = shard.timeline
        sender.next_seq = last + 1
        kept = []
        for push in sender.open:
            number = self.setup.resume(push.seq, last_seq=last)
            if number is None:
                sender.left += 1
                continue
            push.seq = number
            sender.next_seq = max(sender.next_seq, number + 1)
            kept.append(push)
        sender.open = kept

    def check(self) -> None:
        for shard in self.shards:
            applied = [record.push for record in shard.history if record.applied]
            require(len(applied) == len(set(applied)), "a push was applied twice")
            for push, (number, outcome) in self.told.items():
                if number == shard.number and outcome is Outcome.APPLIED:
                    require(push in applied or push in self.rolled_back, "an acknowledged push was lost")
                elif number == shard.number:
                    require(push not in applied, "a push reported as skipped was applied")
            numbers: dict[tuple[int, int], int] = {}
            for record in shard.history:
                key = (record.worker, record.incarnation)
                require(record.seq == numbers.get(key, 0) + 1, "numbers are not dense")
                numbers[key] = record.seq
