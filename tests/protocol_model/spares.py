"""Synchronous steps with spares: the lead chooses whose gradients make a step, and one choice holds for all shards.

The rules are those of shardline.consistency.spares. Each schedule has workers that die, are fenced, are late or are
left behind, servers that die with and without a standby, and old leads that live on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from shardline.consistency import choosing, spares as rules
from shardline.core.choices import members
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block, tree_sum
from tests.protocol_model.numbers import State, Verdict, advance, decide, gradient, initial, require
from tests.protocol_model.standbys import StandbyModel, StandbySetup
from tests.protocol_model.tasks import Bucket, Message, Shard, Worker


@dataclass(frozen=True, kw_only=True)
class SpareSetup(StandbySetup):
    """A schedule with spares. The switches at the end are the rules, each of which can be broken."""

    voted: bool = True
    spares: int = 1
    replayed: tuple[int, ...] = ()
    """The choices of another run, to be repeated."""
    lead_chooses: bool = True
    """False: each shard chooses for itself."""
    hears_all: bool = True
    """A standby that becomes the lead chooses once all shards have told it what they know."""

    @property
    def needed(self) -> int:
        return rules.needed(self.replicas, self.spares, 1.0)


@dataclass
class Known:
    """What a shard knows of choices, and the order in which replicas were whole there."""

    choices: dict[int, int] = field(default_factory=dict)
    arrived: dict[int, list[int]] = field(default_factory=dict)
    may_choose: bool = True


class SpareModel(StandbyModel):
    """The synchronous cluster with standbys, where a step closes before all replicas have contributed."""

    def __init__(self, setup: SpareSetup) -> None:
        super().__init__(setup)
        self.spare = setup
        self.needed = setup.needed
        self.expected = [initial(setup)]
        self.made: list[int] = []
        """The choice of each step of the surviving history."""
        self.known = {shard: Known() for shard in self.shards}
        self.heard: set[int] = set()
        """Shards that have told the lead what they know, in this timeline."""
        self.late = 0
        """Contributions that came after the choice."""

    # The servers.

    def push(self, message: Message) -> Outcome:
        home, n = self.home[message.bucket]
        shard = self.answering(home, message.timeline)
        refused = self.refusal(shard, message.timeline, message.worker.incarnation, message.received)
        if refused is not None:
            return refused
        bucket, replica = shard.buckets[n], message.block.first
        decision = rules.admit_spare(
            self.setup.admit(
                message.step, bucket.counted, message.block, bucket_step=bucket.step, replicas=self.setup.replicas
            ),
            message.step,
            replica,
            bucket_step=bucket.step,
            choice=self.known[shard].choices.get(message.step),
        )
        if decision.outcome is Outcome.COUNTED:
            bucket.held[message.block] = message.value
            bucket.counted.add(replica)
            if all(b.step == bucket.step and replica in b.counted for b in shard.buckets):
                self.known[shard].arrived.setdefault(bucket.step, []).append(replica)
            self.look(shard, bucket.step)
        self.counts.duplicates += decision.outcome is Outcome.DUPLICATE
        self.late += decision.outcome is Outcome.LATE_DROPPED
        require(decision.outcome is not Outcome.REFUSED, f"bucket {bucket.number} refused: {decision.reason}")
        return decision.outcome

    def look(self, shard: Shard, step: int) -> None:
        """Choose, if this is the lead and enough has arrived."""
        known, setup = self.known[shard], self.spare
        if step in known.choices or (shard.number and setup.lead_chooses):
            return
        if step < len(setup.replayed):
            known.choices[step] = setup.replayed[step]
        elif known.may_choose or not setup.hears_all:
            choice = choosing.choose(known.arrived.get(step, []), self.needed)
            if choice is not None:
                known.choices[step] = choice

    def ask(self, shard: Shard, step: int) -> None:
        """A shard that has enough asks who leads its timeline whose gradients count; the answer may be lost."""
        lead = self.answering(self.shards[0], shard.timeline)
        if len(self.known[shard].arrived.get(step, [])) < self.needed or self.random.random() < 0.3:
            return
        if lead.status == shard.status == "active" and lead.timeline == shard.timeline:
            choice = self.known[lead].choices.get(step)
            if choice is not None:
                self.known[shard].choices[step] = choice

    def vote(self, shard: Shard) -> None:
        step = min((bucket.step for bucket in shard.buckets), default=-1)
        if step >= 0:
            self.look(shard, step)
        if step not in self.known[shard].choices and shard.status == "active":
            self.ask(shard, step)
        super().vote(shard)

    def complete(self, shard: Shard, step: int) -> bool:
        choice = self.known[shard].choices.get(step)
        return choice is not None and all(b.step == step and {*members(choice)} <= b.counted for b in shard.buckets)

    def mean(self, bucket: Bucket) -> float:
        shard = next(s for s in [*self.shards, *self.old] if any(b is bucket for b in s.buckets))
        chosen = members(self.known[shard].choices[bucket.step])
        bucket.held = {Block(replica, 1): bucket.held[Block(replica, 1)] for replica in chosen}
        return float(cast(Any, tree_sum)(list(bucket.held.values()))) / self.needed

    def lead_vote(self, shard: Shard, step: int, means: dict[int, float]) -> Verdict | None:
        lead = self.shards[0]
        before, choice = lead.decided, self.known[lead].choices.get(step)
        if lead.status == "active" and lead.timeline == shard.timeline and choice is not None:
            same = self.known[shard].choices[step] == choice
            require(same, f"step {step}: shard {shard.number} knows another choice than the lead")
        verdict = super().lead_vote(shard, step, means)
        if lead.decided != before and choice is not None:
            self.commit(step, choice, cast(tuple[int, Verdict], lead.decided)[1])
        return verdict

    def commit(self, step: int, choice: int, verdict: Verdict) -> None:
        """The verdict on a step: what the step is to be from now on, computed alone from the choice."""
        states, chosen = self.expected[step], members(choice)
        require(len(chosen) == self.needed, f"step {step} is made of {chosen}")
        thetas = [state.theta for state in states]
        columns = zip(*(gradient(self.setup, step, replica, thetas) for replica in chosen), strict=True)
        means = [cast(Any, tree_sum)(column) / self.needed for column in columns]
        require(decide(dict(enumerate(means))) == verdict, f"step {step} was decided otherwise")
        following: tuple[State, ...] = tuple(advance(s, m, step, verdict) for s, m in zip(states, means, strict=True))
        self.expected[step + 1 :], self.made[step:] = [following], [choice]

    # Workers.

    def work(self, worker: Worker) -> None:
        # Every third one is slow, so that others get steps ahead of it.
        if worker.incarnation % 3 or self.random.random() < 0.1:
            super().work(worker)

    def ask_progress(self, worker: Worker) -> None:
        home = self.random.choice([s for s in self.shards if s.number not in worker.answers])
        shard = self.answering(home, worker.timeline)
        refused = self.refusal(shard, worker.timeline, worker.incarnation)
        if refused is not None:
            self.turned_away(worker, refused)
            return
        choices = self.known[shard].choices
        worker.answers[shard.number] = min(
            rules.progress_of_spare(
                bucket.step, replica, counted=replica in bucket.counted, choice=choices.get(bucket.step)
            )
            for bucket in shard.buckets
            for replica in worker.replicas
        )
        if len(worker.answers) == len(self.shards):
            worker.begin(min(worker.answers.values()), self.setup.buckets)

    def overtaken(self, worker: Worker, bucket: int) -> None:
        if self.spare.spares:
            # The others went on without it: it goes on with them.
            worker.restart()
        else:
            super().overtaken(worker, bucket)

    def compute(self, worker: Worker) -> None:
        thetas = [theta for theta in worker.params if theta is not None]
        step = worker.want
        if worker.timeline == self.timeline and not self.commands:
            require(thetas == [s.theta for s in self.expected[step]], f"parameters of step {step} are mixed or wrong")
        if step == self.setup.steps:
            return
        worker.gradients = {r: gradient(self.setup, step, r, thetas) for r in worker.replicas}
        worker.first = False
        for number in range(self.setup.buckets):
            self.put(worker, number, [Block(r, 1) for r in worker.replicas])
        worker.await_step(step + 1, self.setup.buckets)

    # Deaths, rollbacks, promotions.

    def lose(self, shard: Shard) -> None:
        before = len(self.old)
        super().lose(shard)
        if len(self.old) > before:
            self.known[self.old[-1]], self.known[shard] = self.known[shard], Known()

    def choice_of(self, shard: Shard, step: int) -> int:
        return self.known[shard].choices.get(step, 0)

    def begin_rollback(self) -> None:
        super().begin_rollback()
        self.cuts = {step: cut for step, cut in self.cuts.items() if step <= self.rollback_to}
        del self.expected[self.rollback_to + 1 :], self.made[self.rollback_to :]
        self.heard.clear()

    def continue_rollback(self) -> None:
        order, shard = self.commands[-1]
        if order == "configure":
            # Until then it may count and choose, for the timeline that has ended.
            self.known[shard] = Known()
        super().continue_rollback()

    def begin_failover(self, blank: list[Shard]) -> None:
        super().begin_failover(blank)
        self.heard.clear()
        self.to_tell.clear()

    def promote(self, shard: Shard) -> None:
        standby = self.standbys[shard.number]
        super().promote(shard)
        if shard.status == "active":
            step = standby.verdict[0] if standby.verdict is not None else -1
            self.known[shard] = Known({step: standby.choice}, may_choose=False)

    def tell_lead(self, shard: Shard) -> None:
        super().tell_lead(shard)
        lead = self.shards[0]
        if shard.number in self.to_tell:
            return
        step, choice = max(self.known[shard].choices.items(), default=(-1, 0))
        known = self.known[lead].choices.setdefault(step, choice)
        require(known == choice, f"step {step}: shard {shard.number} tells another choice than the lead knows")
        self.heard.add(shard.number)
        if len(self.heard) == len(self.shards):
            self.known[lead].may_choose = True
