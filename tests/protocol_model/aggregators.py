"""Aggregators between workers and shards (1.4.9): they die, come back, lose touch and are late, and the bits stay.

A worker goes through the aggregator that it chose when it last asked for its progress. The servers are those of the
synchronous model, with the product's rules; so is what an aggregator admits and which blocks leave it.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardline.core.outcome import Outcome
from shardline.core.reduce import Block, cover
from tests.protocol_model.numbers import Setup, block_sum, require
from tests.protocol_model.synchronous import Model
from tests.protocol_model.tasks import Message, Worker

DONE = (Outcome.COUNTED, Outcome.DUPLICATE)


class Relayed:
    """A bucket at an aggregator. `left`: what has left of the open step; `awaited`: who contributed to the last."""

    def __init__(self) -> None:
        self.step = self.oldest = self.gone = self.wanted = -1
        self.pub: dict[int, float | None] = {}
        self.held: dict[Block, float] = {}
        self.counted: set[int] = set()
        self.left: set[int] = set()
        self.awaited: frozenset[int] = frozenset()

    def arrived(self, step: int, value: float | None) -> None:
        follows = step == self.step + 1 and self.step >= 0
        self.awaited = frozenset(self.counted) if follows else frozenset()
        self.oldest = max(self.oldest, step - 1) if follows else step
        self.step = step
        self.pub[step % 2] = value
        self.held, self.counted, self.left = {}, set(), set()


class Aggregator(Worker):
    """One life of it; at the servers it is a task like a worker. outbox: sums on their way, by bucket and block."""

    def __init__(self, incarnation: int, buckets: int) -> None:
        super().__init__(incarnation, ())
        self.alive = True
        self.count = buckets
        self.renew(0)

    def renew(self, timeline: int) -> None:
        self.timeline = timeline
        self.relayed = [Relayed() for _ in range(self.count)]
        self.sums: dict[tuple[int, int, Block], float] = {}


class AggregatedModel(Model):
    """looks_back: an aggregator that has missed steps pulls the one before the wanted one too."""

    def __init__(self, setup: Setup, *, aggregators: int = 1, deaths: int = 6, looks_back: bool = True) -> None:
        self.between: list[Aggregator] = []
        self.ways: dict[tuple[int, int], Aggregator | None] = {}
        """By the incarnation and epoch of a worker."""
        self.deaths, self.looks_back = deaths, looks_back
        self.sums = self.shared = 0
        """Pushes of aggregators that counted, and those among them that had several contributions."""
        super().__init__(setup)
        for _ in range(aggregators):
            self.start_aggregator()

    def start_aggregator(self) -> None:
        self.incarnations += 1
        self.members.add(self.incarnations)
        self.between.append(Aggregator(self.incarnations, self.setup.buckets))

    def way(self, worker: Worker) -> Aggregator | None:
        return self.ways.get((worker.incarnation, worker.epoch))

    def act(self) -> None:
        if self.random.random() < 0.4 and self.between:
            self.relay(self.random.choice(self.between))
        else:
            super().act()

    def disturb(self) -> None:
        """An aggregator dies, or a worker that can't reach it for a moment leaves it."""
        if self.random.random() < 0.5:
            super().disturb()
        elif self.deaths and self.between and self.random.random() < 0.7:
            self.deaths -= 1
            gone = self.random.choice(self.between)
            gone.alive = False
            self.between.remove(gone)
            if self.random.random() < 0.5:
                # Only now and then is what it has sent refused.
                self.members.discard(gone.incarnation)
            self.start_aggregator()
        else:
            worker = self.random.choice(self.workers) if self.workers else None
            if worker is not None and self.way(worker) is not None:
                worker.restart()

    # Workers

    def work(self, worker: Worker) -> None:
        if worker.phase == "join" and not self.commands:
            choices = [one for one in self.between if one.timeline == self.timeline]
            away = not choices or self.random.random() < 0.1
            self.ways[worker.incarnation, worker.epoch] = None if away else self.random.choice(choices)
        super().work(worker)

    def ask_progress(self, worker: Worker) -> None:
        way = self.way(worker)
        if way is not None and not way.alive:
            worker.restart()
        else:
            super().ask_progress(worker)

    def pull(self, worker: Worker) -> None:
        way = self.way(worker)
        if way is None:
            super().pull(worker)
            return
        if not way.alive or way.timeline != worker.timeline:
            worker.restart()
            return
        number = self.random.choice(worker.to_pull)
        bucket = way.relayed[number]
        if worker.want > bucket.step:
            if worker.want <= bucket.gone:
                self.missed(worker, number)
            else:
                bucket.wanted = max(bucket.wanted, worker.want)
        elif worker.want < max(bucket.step - 1, bucket.oldest):
            self.missed(worker, number)
        else:
            worker.params[number] = bucket.pub[worker.want % 2]
            worker.to_pull.remove(number)
            worker.past(number)
            if not worker.to_pull:
                self.compute(worker)

    def missed(self, worker: Worker, number: int) -> None:
        """Parameters are gone, which only a worker that has been replaced may find."""
        if self.owns(worker):
            self.overtaken(worker, number)
        else:
            worker.restart()

    # Pushes

    def push(self, message: Message) -> Outcome:
        sender = message.worker
        if isinstance(sender, Aggregator):
            outcome = super().push(message)
            if sender.alive and sender.timeline == message.timeline and self.random.random() < 0.8:
                self.answered(sender, message, outcome)
            return outcome
        way = self.ways.get((sender.incarnation, message.epoch))
        if way is None:
            return super().push(message)
        if not way.alive:
            return Outcome.NOT_CONFIGURED
        if way.timeline != message.timeline:
            return Outcome.WRONG_TIMELINE
        # Its table of members may be an old one, so those that are fenced at the servers may come.
        bucket = way.relayed[message.bucket]
        if message.step > bucket.step:
            return Outcome.NOT_CONFIGURED
        decision = self.setup.admit(
            message.step, bucket.counted, message.block, bucket_step=bucket.step, replicas=self.setup.replicas
        )
        if decision.outcome is Outcome.COUNTED:
            bucket.held[message.block] = message.value
            bucket.counted.update(range(message.block.first, message.block.end))
            bucket.wanted = max(bucket.wanted, bucket.step + 1)
            if bucket.awaited <= bucket.counted:
                self.leave(way, message.bucket)
        return decision.outcome

    def leave(self, way: Aggregator, number: int) -> None:
        """All that has not left yet leaves, as few blocks."""
        bucket = way.relayed[number]
        for block in cover(bucket.counted - bucket.left, self.setup.replicas):
            way.sums[number, bucket.step, block] = block_sum(bucket.held, block)
            self.shared += block not in bucket.held
        bucket.left = set(bucket.counted)

    def answered(self, way: Aggregator, message: Message, outcome: Outcome) -> None:
        key = (message.bucket, message.step, message.block)
        if outcome in DONE:
            self.sums += way.sums.pop(key, None) is not None
        elif outcome is Outcome.SPLIT and way.sums.pop(key, None) is not None:
            bucket = way.relayed[message.bucket]
            if bucket.step == message.step:
                self.put_parts(way, message, bucket.held)

    def put_parts(self, way: Aggregator, message: Message, held: dict[Block, float]) -> None:
        inside = [block for block in held if message.block.first <= block.first and block.end <= message.block.end]
        if message.block in inside:
            self.give_up(way)
            return
        way.sums.update({(message.bucket, message.step, block): held[block] for block in inside})

    def give_up(self, way: Aggregator) -> None:
        """It sends its members away; they go to the servers."""
        way.alive = False
        self.between.remove(way)
        self.start_aggregator()

    # What an aggregator does by itself

    def relay(self, way: Aggregator) -> None:
        if way.timeline != self.timeline:
            if not self.commands:
                way.renew(self.timeline)
            return
        dice = self.random.random()
        if dice < 0.5 and way.sums:
            number, step, block = self.random.choice(list(way.sums))
            value = way.sums[number, step, block]
            message = Message(way, way.epoch, way.timeline, number, block, step, value, received=False)
            self.net.append(message)
        elif dice < 0.502:
            # The time to wait for others is over.
            self.leave(way, self.random.randrange(self.setup.buckets))
        else:
            self.fetch(way, self.random.randrange(self.setup.buckets))

    def fetch(self, way: Aggregator, number: int) -> None:
        bucket, (home, n) = way.relayed[number], self.home[number]
        shard = self.answering(home, way.timeline)
        if bucket.wanted <= bucket.step or self.refusal(shard, way.timeline, way.incarnation) is not None:
            return
        held = shard.buckets[n]
        # Others may still need the step before.
        steps = [bucket.wanted - 1] * (self.looks_back and 0 < bucket.wanted != bucket.step + 1) + [bucket.wanted]
        for step in steps:
            outcome = self.setup.serve(step, bucket_step=held.step, oldest=held.oldest)
            if outcome is Outcome.OVERTAKEN:
                bucket.gone = max(bucket.gone, step)
            elif outcome is Outcome.SERVED:
                bucket.arrived(step, held.read(step))

    # The chief

    def admit_worker(self, replicas: Iterable[int]) -> None:
        super().admit_worker(replicas)
        require(self.workers[-1].incarnation in self.members, "a new worker is a member")
