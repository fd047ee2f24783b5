"""The synchronous cluster: who does what in one atomic action, and the promises checked after it."""

from __future__ import annotations

import random
from collections.abc import Iterable

from shardline.core.outcome import Outcome
from shardline.core.reduce import Block, cover, split
from tests.protocol_model.numbers import (
    APPLY,
    Broken,
    Setup,
    State,
    Verdict,
    advance,
    block_sum,
    decide,
    gradient,
    reference,
    require,
)
from tests.protocol_model.tasks import Bucket, Counts, Message, Shard, Worker

LIMIT = 100_000
"""Actions after which a schedule counts as stuck; most take a few hundred."""


class Servers:
    """The shards: admission, publication, votes, copies."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.counts = Counts(schedules=1)
        self.expected = reference(setup)
        self.whole = Block(0, setup.replicas)
        self.needed = setup.replicas
        """Replicas that make one update."""
        self.members: set[int] = set()
        self.applied: list[list[tuple[int, int]]] = [[] for _ in range(setup.buckets)]
        """Per bucket: (step, replicas counted in it) of the surviving history."""
        self.shards: list[Shard] = []
        first = 0
        for number, count in enumerate(setup.shards):
            self.shards.append(Shard(number, self.make_buckets(range(first, first + count), 0, self.expected[0])))
            first += count
        self.home = [(shard, n) for shard in self.shards for n in range(len(shard.buckets))]

    def make_buckets(self, numbers: Iterable[int], step: int, states: tuple[State, ...]) -> list[Bucket]:
        return [Bucket(b, states[b], step, self.setup.published) for b in numbers]

    def refusal(self, shard: Shard, timeline: int, incarnation: int, received: bool = False) -> Outcome | None:
        """Why a data message changes nothing here, before any rule is asked."""
        if shard.status == "blank":
            return Outcome.NOT_CONFIGURED
        if shard.status != "active" or shard.timeline != timeline:
            self.counts.wrong_timeline += 1
            return Outcome.WRONG_TIMELINE
        if not received and incarnation not in self.members:
            self.counts.fenced += 1
            return Outcome.FENCED
        return None

    def answering(self, shard: Shard, timeline: int) -> Shard:
        """Who answers a task of this timeline for a shard."""
        return shard

    def push(self, message: Message) -> Outcome:
        home, n = self.home[message.bucket]
        shard = self.answering(home, message.timeline)
        refused = self.refusal(shard, message.timeline, message.worker.incarnation, message.received)
        if refused is not None:
            return refused
        bucket = shard.buckets[n]
        decision = self.setup.admit(
            message.step, bucket.counted, message.block, bucket_step=bucket.step, replicas=self.setup.replicas
        )
        if decision.outcome is Outcome.COUNTED:
            bucket.held[message.block] = message.value
            bucket.counted.update(range(message.block.first, message.block.end))
            if not self.setup.voted and len(bucket.counted) == self.setup.replicas:
                self.publish(shard, bucket, APPLY)
        self.counts.duplicates += decision.outcome is Outcome.DUPLICATE
        self.counts.splits += decision.outcome is Outcome.SPLIT
        require(decision.outcome is not Outcome.REFUSED, f"bucket {bucket.number} refused: {decision.reason}")
        return decision.outcome

    def mean(self, bucket: Bucket) -> float:
        if self.setup.canonical:
            return block_sum(bucket.held, self.whole) / self.setup.replicas
        total = 0.0
        for value in bucket.held.values():
            total += value
        return total / self.setup.replicas

    def publish(self, shard: Shard, bucket: Bucket, verdict: Verdict) -> None:
        """The commit point of (bucket, step)."""
        self.applied[bucket.number].append((bucket.step, sum(block.count for block in bucket.held)))
        bucket.publish(advance(bucket.state, self.mean(bucket), bucket.step, verdict))
        self.counts.skipped_steps += verdict.skip
        if self.setup.cut_every and bucket.step % self.setup.cut_every == 0:
            shard.keep_copy(bucket)
        if all(s.status == "active" and s.timeline == shard.timeline for s in self.shards):
            steps = [b.step for s in self.shards for b in s.buckets]
            require(max(steps) - min(steps) <= 1, f"buckets are {max(steps) - min(steps)} steps apart")

    def vote(self, shard: Shard) -> None:
        """One action of a shard in a voted step: ask the lead once all is staged, or apply its verdict to a bucket."""
        if shard.status != "active":
            return
        step = min(bucket.step for bucket in shard.buckets)
        if shard.verdict is not None and shard.verdict[0] == step:
            bucket = self.random.choice([b for b in shard.buckets if b.step == step])
            self.publish(shard, bucket, shard.verdict[1])
        elif self.complete(shard, step):
            verdict = self.lead_vote(shard, step, {b.number: self.mean(b) for b in shard.buckets})
            if verdict is not None and self.random.random() < 0.7:  # else the answer is lost, and asked for again
                shard.verdict = step, verdict

    def complete(self, shard: Shard, step: int) -> bool:
        """Whether all contributions of a step are at a shard, none of whose buckets is past it."""
        return all(b.step == step and len(b.counted) == self.setup.replicas for b in shard.buckets)

    def lead_vote(self, shard: Shard, step: int, means: dict[int, float]) -> Verdict | None:
        """The commit point of the step is here, where the last vote comes in. A repeated vote changes nothing."""
        lead = self.shards[0]
        if lead.status != "active" or lead.timeline != shard.timeline:
            return None
        if lead.decided is None or lead.decided[0] < step:
            votes = lead.votes.setdefault(step, {})
            known = votes.setdefault(shard.number, means)
            require(repr(known) == repr(means), f"shard {shard.number} voted twice on step {step}, differently")
            if len(votes) == len(self.shards):
                lead.decided = step, decide({b: mean for part in votes.values() for b, mean in part.items()})
                del lead.votes[step]
        if lead.decided is not None and lead.decided[0] == step:
            return lead.decided[1]
        return None


class Model(Servers):
    """The cluster. run() plays one schedule to its end and checks the promises all the way."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.net: list[Message] = []
        self.workers: list[Worker] = []
        self.undetected: list[Worker] = []
        """Dead, or declared so, and not fenced yet."""
        self.incarnations = 0
        self.timeline = 1
        self.cuts: dict[int, tuple[State, ...]] = {0: self.expected[0]}
        self.next_cut = setup.cut_every
        self.parts: dict[int, dict[int, State]] = {}
        self.releases: list[tuple[Shard, int]] = []
        self.commands: list[tuple[str, Shard]] = []
        """What is left of a rollback; while there is any, nobody is admitted."""
        self.rollback_to = 0
        self.kills, self.ps_kills = setup.kills, setup.ps_kills
        for w in range(setup.workers):
            self.admit_worker(range(w, setup.replicas, setup.workers))

    # The scheduler.

    def run(self) -> Counts:
        """Play the schedule. Raises Broken where a promise doesn't hold or nothing moves any more."""
        while not self.finished:
            self.counts.actions += 1
            require(self.counts.actions < LIMIT, f"stuck after {LIMIT} actions")
            self.act()
        for number, (shard, n) in enumerate(self.home):
            bucket = shard.buckets[n]
            require(bucket.state == self.expected[-1][number], f"bucket {number} ends in other bits")
            require(bucket.read(self.setup.steps) == bucket.state.theta, f"bucket {number} publishes something else")
            each_once = [(t, self.needed) for t in range(self.setup.steps)]
            require(self.applied[number] == each_once, f"bucket {number} applied {self.applied[number]}")
        return self.counts

    @property
    def finished(self) -> bool:
        return not self.commands and all(
            shard.status == "active" and all(b.step == self.setup.steps for b in shard.buckets) for shard in self.shards
        )

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.05:
            self.disturb()
        elif dice < 0.15:
            self.command()
        elif dice < 0.40:
            if self.net:
                self.deliver()
        elif dice < 0.55 and self.setup.voted:
            self.vote(self.random.choice(self.shards))
        elif self.workers:
            self.work(self.random.choice(self.workers))

    def disturb(self) -> None:
        """A worker dies, or only seems to; a ps dies."""
        if self.ps_kills and self.random.random() < 0.3:
            self.ps_kills -= 1
            self.lose(self.random.choice(self.shards))
        elif self.kills:
            living = [w for w in self.workers if w not in self.undetected and self.owns(w)]
            if living:
                self.kills -= 1
                self.counts.kills += 1
                worker = self.random.choice(living)
                self.undetected.append(worker)
                if self.random.random() < 0.6:
                    self.workers.remove(worker)  # else a zombie: it goes on until it is told

    def lose(self, shard: Shard) -> None:
        """A ps dies with its memory."""
        shard.die()

    def owns(self, worker: Worker) -> bool:
        """Whether it is an admitted worker and no zombie that was replaced."""
        return worker.incarnation in self.members

    # The network.

    def send(self, worker: Worker) -> None:
        bucket, block = self.random.choice(list(worker.outbox))
        value = worker.outbox[bucket, block]
        self.net.append(
            Message(worker, worker.epoch, worker.timeline, bucket, block, worker.want - 1, value, received=False)
        )

    def deliver(self) -> None:
        """A push arrives, any of those under way, maybe not for the last time; its answer may be lost."""
        n = self.random.randrange(len(self.net))
        message = self.net[n]
        if self.random.random() < 0.8:
            self.net[n] = self.net[-1]
            self.net.pop()
        outcome = self.push(message)
        worker = message.worker
        if message.epoch != worker.epoch or worker not in self.workers or self.random.random() < 0.2:
            return
        key = (message.bucket, message.block)
        if outcome in (Outcome.WRONG_TIMELINE, Outcome.NOT_CONFIGURED, Outcome.FENCED):
            self.turned_away(worker, outcome)
        elif message.step == worker.want - 1 and key in worker.outbox:
            del worker.outbox[key]
            if outcome is Outcome.SPLIT:
                self.put(worker, message.bucket, split(message.block))

    def turned_away(self, worker: Worker, outcome: Outcome) -> None:
        if outcome is Outcome.FENCED:
            require(not self.owns(worker), "a member of the table was fenced")
            self.workers.remove(worker)
        else:
            worker.restart()

    # Workers.

    def work(self, worker: Worker) -> None:
        """One action of one worker."""
        if worker.phase == "join":
            if not self.commands:
                worker.timeline = self.timeline
                worker.phase = "ask"
        elif worker.phase == "ask":
            self.ask_progress(worker)
        elif worker.outbox and self.random.random() < 0.6:
            self.send(worker)
        elif worker.to_pull:
            self.pull(worker)
        elif worker.timeline != self.timeline:
            worker.restart()  # it had finished; its heartbeat tells it that the cluster has not

    def ask_progress(self, worker: Worker) -> None:
        home = self.random.choice([s for s in self.shards if s.number not in worker.answers])
        shard = self.answering(home, worker.timeline)
        refused = self.refusal(shard, worker.timeline, worker.incarnation)
        if refused is not None:
            self.turned_away(worker, refused)
            return
        worker.answers[shard.number] = min(
            self.setup.progress(bucket.step, replica in bucket.counted)
            for bucket in shard.buckets
            for replica in worker.replicas
        )
        if len(worker.answers) == len(self.shards):
            worker.begin(min(worker.answers.values()), self.setup.buckets)

    def pull(self, worker: Worker) -> None:
        number = self.random.choice(worker.to_pull)
        home, n = self.home[number]
        shard = self.answering(home, worker.timeline)
        refused = self.refusal(shard, worker.timeline, worker.incarnation)
        if refused is not None:
            self.turned_away(worker, refused)
            return
        bucket = shard.buckets[n]
        outcome = self.setup.serve(worker.want, bucket_step=bucket.step, oldest=bucket.oldest)
        if outcome is Outcome.OVERTAKEN:
            self.counts.overtaken += 1
            self.overtaken(worker, number)
        elif outcome is Outcome.SERVED:
            worker.params[number] = bucket.read(worker.want)
            worker.to_pull.remove(number)
            worker.past(number)
            if not worker.to_pull:
                self.compute(worker)

    def overtaken(self, worker: Worker, bucket: int) -> None:
        if self.setup.fencing:
            raise Broken(f"step {worker.want} of bucket {bucket} is gone, a living worker needs it")
        worker.restart()

    def compute(self, worker: Worker) -> None:
        thetas = [theta for theta in worker.params if theta is not None]
        step = worker.want
        require(thetas == [s.theta for s in self.expected[step]], f"parameters of step {step} are mixed or wrong")
        if step == self.setup.steps:
            return
        worker.gradients = {r: gradient(self.setup, step, r, thetas) for r in worker.replicas}
        blocks = cover(worker.replicas, self.setup.replicas)
        if worker.first and self.random.random() < 0.5:
            blocks = [Block(r, 1) for r in worker.replicas]  # others may be counted in part; else SPLIT tells
        worker.first = False
        for number in range(self.setup.buckets):
            self.put(worker, number, blocks)
        worker.await_step(step + 1, self.setup.buckets)

    def put(self, worker: Worker, bucket: int, blocks: Iterable[Block]) -> None:
        """Encode contributions of blocks, each summed beforehand; they are kept until the bucket is past the step."""
        single = {Block(r, 1): values[bucket] for r, values in worker.gradients.items()}
        worker.outbox.update({(bucket, block): block_sum(single, block) for block in blocks})

    # The chief.

    def admit_worker(self, replicas: Iterable[int]) -> None:
        self.incarnations += 1
        self.members.add(self.incarnations)
        self.workers.append(Worker(self.incarnations, replicas))

    def command(self) -> None:
        """One action of the chief."""
        if any(shard.lost for shard in self.shards):
            self.begin_rollback()
        elif self.commands and self.random.random() < 0.8:
            self.continue_rollback()
        elif self.undetected:
            self.replace(self.undetected.pop(0))
        elif self.random.random() < 0.1:
            self.hand_over()
        elif self.setup.cut_every and not self.commands:
            self.fetch_cut()

    def replace(self, dead: Worker) -> None:
        """Fence, then hand the replicas to a new worker, to a living one, or to several."""
        if self.setup.fencing:
            self.members.discard(dead.incarnation)
            kept = []
            for message in self.net:
                if message.worker is not dead:
                    kept.append(message)
                elif self.random.random() < 0.5:
                    kept.append(message._replace(received=True))
            self.net = kept
        others = [w for w in self.workers if w is not dead and w not in self.undetected and self.owns(w) and w.replicas]
        dice = self.random.random()
        if others and dice < 0.4:
            heir = self.random.choice(others)
            heir.replicas = sorted({*heir.replicas, *dead.replicas})
            heir.restart()
        elif dice < 0.7:
            self.admit_worker(dead.replicas)
        else:
            for replica in dead.replicas:
                self.admit_worker([replica])

    def hand_over(self) -> None:
        """A spare takes a replica off a living worker."""
        rich = [w for w in self.workers if len(w.replicas) > 1 and w not in self.undetected and self.owns(w)]
        if rich and self.setup.fencing:
            worker = self.random.choice(rich)
            replica = self.random.choice(worker.replicas)
            worker.replicas.remove(replica)
            worker.restart()
            self.admit_worker([replica])

    def fetch_cut(self) -> None:
        """Release what is done with, or ask one shard for its copy of the next cut. All shards hold it, or none."""
        if self.releases:
            shard, step = self.releases.pop()
            shard.release(step)
            return
        shard, step = self.random.choice(self.shards), self.next_cut
        if shard.status != "active":
            return
        if step in shard.skipped:
            self.counts.discarded_cuts += 1
        elif shard.has_cut and shard.cut is not None and shard.cut.step == step:
            self.parts[shard.number] = dict(shard.cut.copies)
            if len(self.parts) < len(self.shards):
                return
            self.commit_cut(step)
        else:
            return
        self.parts.clear()
        self.releases = [(shard, step) for shard in self.shards]
        self.random.shuffle(self.releases)
        self.next_cut = step + self.setup.cut_every

    def commit_cut(self, step: int) -> None:
        copies = {b: state for part in self.parts.values() for b, state in part.items()}
        cut = tuple(copies[b] for b in range(self.setup.buckets))
        require(cut == self.expected[step], f"the cut at step {step} is no state of the training")
        self.counts.cuts += 1
        self.counts.repeated_cuts += step in self.cuts
        self.cuts[step] = cut

    def begin_rollback(self) -> None:
        """Journal a new timeline and the cut it starts from; a death during a rollback starts another one."""
        self.counts.rollbacks += 1
        self.timeline += 1
        self.rollback_to = max(self.cuts)
        if self.random.random() < 0.2:  # the last cut can't be read, the one before can
            self.rollback_to = self.random.choice(list(self.cuts))
        self.parts.clear()
        self.releases.clear()
        self.next_cut = self.rollback_to + self.setup.cut_every
        self.commands = []
        for order in ("activate", "restore", "configure"):  # popped from the end
            shards = list(self.shards)
            self.random.shuffle(shards)
            self.commands += [(order, shard) for shard in shards]
        for shard in self.shards:
            shard.lost = False

    def continue_rollback(self) -> None:
        order, shard = self.commands.pop()
        if order == "configure":
            shard.reset(self.timeline)
        elif order == "restore":
            numbers = [b for b, (home, _) in enumerate(self.home) if home is shard]
            shard.buckets = self.make_buckets(numbers, self.rollback_to, self.cuts[self.rollback_to])
            for b in numbers:
                # What the cut holds; it may be of a history that an older cut has since replaced.
                self.applied[b] = [(t, self.needed) for t in range(self.rollback_to)]
        else:
            shard.status = "active"
