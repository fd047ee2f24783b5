"""Standbys of synchronous shards (PROTOCOL 1.8): a second holder of each, which takes over without a rollback.

A primary numbers its records densely and publishes nothing that a record contains before the standby has acknowledged
it. A standby is copied bucket by bucket while training goes on; as long as it is not whole it refuses to be promoted,
so the primary of one that has said so may go on without it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tests.protocol_model.numbers import APPLY, Setup, State, Verdict, advance, require
from tests.protocol_model.synchronous import Model
from tests.protocol_model.tasks import Bucket, Shard


@dataclass(frozen=True, kw_only=True)
class StandbySetup(Setup):
    """A schedule with standbys. The switches at the end are the rules, each of which can be broken."""

    standby_kills: int = 0
    one_at_a_time: bool = True
    """A ps dies only while every shard is protected; else a loss may end in a rollback."""
    hold: bool = True
    """A record's step is published when the standby has acknowledged it."""
    refuse_unsynced: bool = True
    """A standby that is not whole refuses to be promoted."""
    previous: bool = True
    """Copies bring theta_{t-1} too."""
    recast: bool = True
    """After a change of primaries each shard tells the lead the last verdict that it knows."""


@dataclass(frozen=True)
class Image:
    """One bucket as it is copied: what is published, what was before it, and its history."""

    state: State
    step: int
    previous: float | None
    applied: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One record: the beginning of a copy, an image of one bucket, the mark that all are copied, or means."""

    n: int
    begins: bool = False
    image: tuple[int, Image] | None = None
    whole: bool = False
    means: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """By bucket: step, mean gradient, replicas counted."""
    verdict: Verdict = APPLY
    voted: int = -1
    """Step that the verdict is of, where steps are voted."""
    choice: int = 0
    """Whose gradients made that step, where the lead chooses."""


class Standby:
    """The second holder of a shard. Applies records in their order, by the rule that the primary applies."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.setup = setup
        self.number = number
        self.record = 0
        self.buckets: dict[int, Bucket] = {}
        self.applied: dict[int, list[tuple[int, int]]] = {}
        self.verdict: tuple[int, Verdict] | None = None
        self.choice = 0
        self.synced = False
        self.closed = False
        """It was promoted, or is forgotten: it takes no records any more."""
        self.dead = False

    def take(self, entry: Entry) -> None:
        if entry.begins:
            self.buckets, self.applied, self.synced = {}, {}, False
        require(entry.n == self.record + 1, f"standby {self.number} got record {entry.n} after {self.record}")
        self.record = entry.n
        if entry.image is not None:
            number, image = entry.image
            bucket = Bucket(number, image.state, image.step, self.setup.published)
            if image.previous is not None:
                bucket.pub[(image.step - 1) % len(bucket.pub)] = image.previous
                bucket.oldest = image.step - 1
            self.buckets[number] = bucket
            self.applied[number] = list(image.applied)
        for number, (step, mean, replicas) in entry.means.items():
            bucket = self.buckets[number]
            require(bucket.step == step, f"standby's bucket {number} is at {bucket.step}, the record is of step {step}")
            self.applied[number].append((step, replicas))
            bucket.publish(advance(bucket.state, mean, step, entry.verdict))
        if entry.voted >= 0:
            self.verdict, self.choice = (entry.voted, entry.verdict), entry.choice
        self.synced |= entry.whole


@dataclass
class Link:
    """A primary's end of the stream, and what is on the wire in both directions."""

    standby: Standby | None = None
    sent: int = 0
    entries: deque[Entry] = field(default_factory=deque)
    acks: deque[int] = field(default_factory=deque)
    copied: set[int] = field(default_factory=set)
    begun: bool = False
    """The standby has said that it is being copied: it won't let itself be promoted before it is whole."""
    marked: bool = False
    pending: dict[int, list[tuple[Bucket, Verdict]]] = field(default_factory=dict)
    """By record: what is published once it is acknowledged."""

    def holds(self, bucket: Bucket) -> bool:
        return any(held is bucket for items in self.pending.values() for held, _ in items)

    def append(self, entry: Entry) -> int:
        self.sent = entry.n
        self.entries.append(entry)
        return entry.n


class StandbyModel(Model):
    """The synchronous cluster with a standby for every shard."""

    def __init__(self, setup: StandbySetup) -> None:
        super().__init__(setup)
        self.rules = setup
        self.links = {shard: Link() for shard in self.shards}
        """By primary, old ones too."""
        self.old: list[Shard] = []
        """Lost primaries: what they sent may still arrive, and some live on, cut off from the chief."""
        self.zombies: list[Shard] = []
        self.standbys: dict[int, Standby] = {}
        """By shard, as the chief has it."""
        self.standby_kills = setup.standby_kills
        self.pace = self.random.choice((0.08, 0.2, 0.4))
        """How much of what happens is records and acknowledgements: a slow standby, or a fast one."""
        self.to_tell: set[int] = set()
        """Shards that have not told the lead their last verdict since the timeline changed."""

    @property
    def protected(self) -> bool:
        """Whether every shard has a whole standby, and no death is being dealt with."""
        if self.commands or any(shard.status == "blank" for shard in self.shards):
            return False
        there = [self.standbys.get(shard.number) for shard in self.shards]
        return all(standby is not None and standby.synced and not standby.dead for standby in there)

    def answering(self, shard: Shard, timeline: int) -> Shard:
        found = [zombie for zombie in self.zombies if zombie.number == shard.number and zombie.timeline == timeline]
        return self.random.choice([*found, shard])

    def act(self) -> None:
        if self.random.random() < self.pace:
            self.replicate(self.random.choice([*self.shards, *self.old]))
        else:
            super().act()

    # The primary.

    def publish(self, shard: Shard, bucket: Bucket, verdict: Verdict) -> None:
        self.decided(shard, [bucket], verdict, -1)

    def decided(self, shard: Shard, buckets: list[Bucket], verdict: Verdict, voted: int) -> None:
        """Send what was decided to the standby; publish when it is acknowledged, at once where there is none."""
        link, items = self.links[shard], [(bucket, verdict) for bucket in buckets]
        copied = [bucket for bucket in buckets if bucket.number in link.copied]
        if copied:
            means = {b.number: (b.step, self.mean(b), sum(block.count for block in b.held)) for b in copied}
            choice = self.choice_of(shard, voted)
            n = link.append(Entry(n=link.sent + 1, means=means, verdict=verdict, voted=voted, choice=choice))
            self.counts.records += 1
            if self.rules.hold:
                link.pending[n] = items
                return
        self.release(shard, items)

    def choice_of(self, shard: Shard, step: int) -> int:
        """Whose gradients make a step; 0 where all do."""
        return 0

    def release(self, shard: Shard, items: list[tuple[Bucket, Verdict]]) -> None:
        for bucket, verdict in items:
            if shard in self.zombies:
                bucket.publish(advance(bucket.state, self.mean(bucket), bucket.step, verdict))
            else:
                super().publish(shard, bucket, verdict)

    def replicate(self, shard: Shard) -> None:
        """One action of a primary and its standby, or of the wire between them."""
        link = self.links[shard]
        standby = link.standby
        if standby is None:
            return
        dice = self.random.random()
        living = shard.status == "active" and (shard not in self.old or shard in self.zombies)
        if dice < 0.45 and link.entries:
            self.arrive(link, standby)
        elif not living:
            return
        elif dice < 0.8 and link.acks:
            n = link.acks.popleft()
            link.begun = True
            self.release(shard, link.pending.pop(n, []))
        elif not link.sent:
            link.append(Entry(n=1, begins=True))
        elif link.begun and not link.marked:
            self.copy_one(shard, link)

    def arrive(self, link: Link, standby: Standby) -> None:
        if standby.dead:
            return
        entry = link.entries.popleft()
        if not standby.closed:
            standby.take(entry)
            link.acks.append(entry.n)

    def copy_one(self, shard: Shard, link: Link) -> None:
        left = [bucket for bucket in shard.buckets if bucket.number not in link.copied]
        if not left:
            step, verdict = shard.verdict if shard.verdict is not None else (-1, APPLY)
            choice = self.choice_of(shard, step)
            link.append(Entry(n=link.sent + 1, whole=True, verdict=verdict, voted=step, choice=choice))
            link.marked = True
            self.counts.copies += 1
            return
        bucket = self.random.choice(left)
        if link.holds(bucket):
            return
        reach = self.rules.previous and bucket.step > bucket.oldest
        image = Image(
            bucket.state,
            bucket.step,
            bucket.read(bucket.step - 1) if reach else None,
            tuple(self.applied[bucket.number]),
        )
        link.append(Entry(n=link.sent + 1, image=(bucket.number, image)))
        link.copied.add(bucket.number)

    def go_alone(self, shard: Shard) -> None:
        """The chief's word: without a standby from now on."""
        link, self.links[shard] = self.links[shard], Link()
        self.standbys.pop(shard.number, None)
        for items in link.pending.values():
            self.release(shard, items)

    # Votes: a voted step of a shard is one record.

    def vote(self, shard: Shard) -> None:
        if shard.number in self.to_tell:
            self.tell_lead(shard)
        step = min((bucket.step for bucket in shard.buckets), default=-1)
        if shard.verdict is None or shard.verdict[0] != step:
            super().vote(shard)
            return
        # A promoted standby may know the verdict of a step whose contributions went with the old primary.
        if (
            self.complete(shard, step)
            and shard.status == "active"
            and not any(self.links[shard].holds(b) for b in shard.buckets)
        ):
            self.decided(shard, list(shard.buckets), shard.verdict[1], step)

    def tell_lead(self, shard: Shard) -> None:
        lead = self.shards[0]
        if shard.status == lead.status == "active" and lead.timeline == shard.timeline:
            self.to_tell.discard(shard.number)
            if shard.verdict is not None and (lead.decided is None or lead.decided[0] < shard.verdict[0]):
                lead.decided = shard.verdict

    # Deaths.

    def disturb(self) -> None:
        if self.standby_kills and self.random.random() < 0.2:
            there = [s for s in self.standbys.values() if not s.dead]
            if there and (self.protected or not self.rules.one_at_a_time):
                self.standby_kills -= 1
                self.random.choice(there).dead = True
        else:
            super().disturb()

    def lose(self, shard: Shard) -> None:
        """A primary dies, or is cut off; with it the standby of another shard that its ps may hold."""
        if shard.status == "blank" or (self.rules.one_at_a_time and not self.protected):
            self.ps_kills += 1
            return
        old = Shard(shard.number, [])
        old.__dict__.update(shard.__dict__)
        self.links[old], self.links[shard] = self.links[shard], Link()
        self.old.append(old)
        shard.buckets = []  # the old primary's
        shard.die()
        if self.random.random() < 0.4:
            self.zombies.append(old)
            return
        while self.links[old].entries and self.random.random() < 0.7:
            self.links[old].entries.pop()
        others = [s for s in self.standbys.values() if s.number != shard.number]
        if others and self.random.random() < 0.5:
            self.random.choice(others).dead = True

    # The chief.

    def command(self) -> None:
        blank = [shard for shard in self.shards if shard.status == "blank"]
        if any(shard.lost for shard in self.shards):
            there = [self.standbys.get(shard.number) for shard in blank]
            if all(standby is not None and not standby.dead for standby in there):
                self.begin_failover(blank)
            else:
                self.begin_rollback()
            return
        dead = [shard for shard in self.shards if (s := self.standbys.get(shard.number)) is not None and s.dead]
        bare = [shard for shard in self.shards if shard.number not in self.standbys]
        if not self.commands and dead:
            self.go_alone(dead[0])
        elif not self.commands and bare and self.random.random() < 0.5:
            standby = self.standbys[bare[0].number] = Standby(self.setup, bare[0].number)
            self.links[bare[0]] = Link(standby=standby)
        else:
            super().command()

    def begin_failover(self, blank: list[Shard]) -> None:
        """Journal a new timeline with other primaries. First they are promoted, then everybody is told."""
        self.timeline += 1
        self.commands = [("move", shard) for shard in self.shards]
        self.random.shuffle(self.commands)
        self.commands += [("promote", shard) for shard in blank]
        self.parts.clear()
        for shard in self.shards:
            shard.lost = False

    def begin_rollback(self) -> None:
        super().begin_rollback()
        for shard in self.shards:
            self.links[shard] = Link()
        for standby in self.standbys.values():
            standby.closed = True
        self.standbys.clear()
        self.to_tell.clear()

    def continue_rollback(self) -> None:
        order, shard = self.commands[-1]
        if order == "promote":
            self.commands.pop()
            self.promote(shard)
        elif order == "move":
            self.commands.pop()
            self.move(shard)
        else:
            super().continue_rollback()

    def promote(self, shard: Shard) -> None:
        standby = self.standbys[shard.number]
        if self.rules.refuse_unsynced and not standby.synced:
            self.begin_rollback()
            return
        whole = len(standby.buckets) == self.setup.shards[shard.number]
        require(whole, f"a standby of shard {shard.number} was promoted that lacks buckets")
        standby.closed = True
        del self.standbys[shard.number]
        self.links[shard] = Link()
        shard.buckets = [standby.buckets[number] for number in sorted(standby.buckets)]
        shard.verdict = standby.verdict
        for number, applied in standby.applied.items():
            self.applied[number] = applied
        # Copies of cuts went with the old primary: what is behind some bucket already will not be whole.
        highest = max(bucket.step for bucket in shard.buckets)
        shard.skipped = {step for step in range(highest + 1) if self.setup.cut_every}
        shard.timeline, shard.status = self.timeline, "active"
        self.counts.promotions += 1

    def move(self, shard: Shard) -> None:
        """Contributions, and all else that the shard holds, stay."""
        if shard.status == "blank":
            return
        shard.timeline = self.timeline
        # A vote is of its timeline.
        shard.votes.clear()
        if self.rules.recast:
            self.to_tell.add(shard.number)
        standby = self.standbys.get(shard.number)
        if standby is not None and standby.dead:
            self.go_alone(shard)
