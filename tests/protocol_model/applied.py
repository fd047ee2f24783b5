"""Workers that run the optimizer, under kills: the real shards and the real optimizer of a worker, without a network.

Every action is atomic: a worker locates its step, pushes one replica's gradient to one shard, pulls from one shard; a
process is killed, its death noticed, a new one started; a server is lost; the chief commits a cut. A worker may die
between two shards that it brings its state to. Old pushes are delivered again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardline.cadence import Held, Outgoing, Told
from shardline.client.applied.worker_optimizer import ServerStates, WorkerOptimizer
from shardline.client.exchange.shard_exchange import Restart
from shardline.client.layout import ModelLayout
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.plan import Plan, make_plan
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec, RuleSpec, TensorSpec
from shardline.division.share import Share
from shardline.waist import Sender
from shardline_ps.shard.shard import Shard
from tests.protocol_model.numbers import require
from tests.support.builders import make_job_spec, make_settings

LIMIT = 20_000
"""Actions after which a schedule counts as stuck; most take a few hundred."""
NAMES = ("a", "b", "c")
TENSORS = tuple(TensorSpec(name=name, shape=(2 + number,), dtype="float32") for number, name in enumerate(NAMES))
Cut = dict[int, list[BucketImage]]
"""Images by shard."""


@dataclass(frozen=True, kw_only=True)
class AppliedSetup:
    seed: int
    rule: RuleSpec
    replicas: int = 3
    steps: int = 12
    every: int = 4
    kills: int = 6
    losses: int = 2
    """Servers that are lost."""
    goes_back: bool = True
    """A new worker takes the job back to a cut."""


@dataclass
class AppliedCounts:
    schedules: int = 0
    kills: int = 0
    died_bringing: int = 0
    rollbacks: int = 0
    takeovers: int = 0
    taken: int = 0
    """States that workers took from the shards."""
    applied: int = 0
    duplicates: int = 0


class Died(Exception):
    """The process is killed."""


def gradient_of(values: dict[str, torch.Tensor], step: int, replica: int) -> dict[str, torch.Tensor]:
    """A function of the parameters; the last tensor has none in odd steps."""
    return {
        name: value * 0.1 + 0.01 * (replica + 1) * (step + 1)
        for name, value in values.items()
        if name != NAMES[-1] or step % 2 == 0
    }


def contribution(plan: Plan, shard: int, bucket: int, gradients: dict[str, torch.Tensor]) -> Gradient:
    spec = plan.shards[shard].buckets[bucket]
    flat, present = torch.zeros(spec.elements), []
    for piece in spec.slices:
        tensor = plan.tensors[piece.tensor]
        present.append(tensor.name in gradients)
        if present[-1]:
            first = piece.first_row * tensor.row_elements
            flat[piece.offset : piece.end] = gradients[tensor.name].reshape(-1)[first : first + piece.elements]
    return Gradient(flat if any(present) else None, tuple(present))


def make_shards(setup: AppliedSetup, plan: Plan, *, aggregates: bool) -> list[Shard]:
    settings = make_settings(
        plan, rule=setup.rule, replicas=setup.replicas, cut_every=setup.every, aggregates=aggregates
    )
    shards = [Shard(number, settings) for number in range(len(plan.shards))]
    for shard in shards:
        for bucket in shard.buckets:
            first = torch.arange(bucket.spec.elements, dtype=torch.float32) / 7.0
            shard.initialize(bucket.number, first)
    return shards


def images(shards: Sequence[Shard]) -> Cut:
    return {shard.number: [bucket.image() for bucket in shard.buckets] for shard in shards}


def expected(setup: AppliedSetup, plan: Plan) -> list[Cut]:
    """The cut of every step, where servers run the optimizer and nobody dies."""
    shards, values = make_shards(setup, plan, aggregates=False), {t.name: torch.zeros(t.shape) for t in TENSORS}
    layout, found = ModelLayout(plan, values), [images(shards)]
    for step in range(setup.steps):
        for shard in shards:
            for bucket in shard.buckets:
                layout.load(shard.number, bucket.number, bucket.values)
        for replica in range(setup.replicas):
            gradients = gradient_of(values, step, replica)
            for shard in shards:
                for bucket in shard.buckets:
                    given = contribution(plan, shard.number, bucket.number, gradients)
                    shard.contribute(bucket.number, step, Block(replica, 1), given)
        found.append(images(shards))
    return found


def check_cut(ours: Cut, theirs: Cut) -> None:
    for shard, held in ours.items():
        for image, right in zip(held, theirs[shard], strict=True):
            where = f"bucket {image.bucket} of shard {shard} in the cut of step {image.step}"
            require(image.step == right.step and image.version == right.version, f"{where}: {image.version}")
            require(image.tensors.keys() == right.tensors.keys(), f"{where} has {sorted(image.tensors)}")
            require(tuple(image.initialized) == tuple(right.initialized), f"{where}: another state is there")
            require(dict(image.scalars) == dict(right.scalars), f"{where} has other numbers")
            for name, values in right.tensors.items():
                require(torch.equal(image.tensors[name], values), f"{where} has another {name}")


@dataclass
class Process:
    """One life of a worker."""

    incarnation: int
    local: WorkerOptimizer
    model: dict[str, torch.Tensor]
    pulled: dict[str, torch.Tensor]
    alive: bool = True
    noticed: bool = False
    timeline: int = -1
    step: int = -1
    replicas: tuple[int, ...] = ()
    to_push: list[tuple[int, int]] = field(default_factory=list)
    """(replica, shard)."""
    to_pull: list[int] = field(default_factory=list)
    wanting: list[int] = field(default_factory=list)
    gradients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


class AppliedModel:
    """A cluster that is played to its end."""

    def __init__(self, setup: AppliedSetup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.counts = AppliedCounts(schedules=1)
        self.plan = make_plan(TENSORS, 2)
        self.job: JobSpec = make_job_spec(
            tensors=TENSORS, rule=setup.rule, replicas=setup.replicas, steps=setup.steps, apply="worker"
        )
        self.expected = expected(setup, self.plan)
        self.shards = make_shards(setup, self.plan, aggregates=True)
        self.timeline, self.lives = 1, 0
        self.committed: tuple[int, Cut] = 0, images(self.shards)
        self.owners: dict[int, Process] = {}
        self.processes: list[Process] = []
        self.kills, self.losses = setup.kills, setup.losses
        self.sent: list[tuple[int, int, int, int, int, dict[str, torch.Tensor]]] = []
        for _ in range(2):
            self.start()
        self._bound()

    def play(self) -> AppliedCounts:
        for _ in range(LIMIT):
            if self.committed[0] == self.setup.steps:
                return self.counts
            self.act()
        raise AssertionError(f"stuck at cut {self.committed[0]}, steps {[s.step_min for s in self.shards]}")

    def act(self) -> None:
        dice = self.random.random()
        living = [process for process in self.processes if process.alive]
        if dice < 0.01 and self.kills and living:
            self.kill(self.random.choice(living))
        elif dice < 0.012 and self.losses:
            self.losses -= 1
            self.roll_back()
        elif dice < 0.05:
            self.notice()
        elif dice < 0.07 and len(living) < 3:
            self.start()
        elif dice < 0.12:
            self.commit()
        elif dice < 0.14 and self.sent:
            self.deliver(*self.random.choice(self.sent))
        elif living:
            process = self.random.choice(living)
            try:
                self.work(process)
            except Died:
                self.counts.died_bringing += 1
                self.kill(process)

    # The chief

    def kill(self, process: Process) -> None:
        process.alive = False
        self.kills -= 1
        self.counts.kills += 1

    def notice(self) -> None:
        """Fence dead processes, and give their replicas to others."""
        dead = [process for process in self.processes if not process.alive]
        living = [process for process in self.processes if process.alive]
        if not dead or not living:
            return
        self.processes = living
        for replica, owner in list(self.owners.items()):
            if not owner.alive:
                self.owners[replica] = self.random.choice(living)
                self.counts.takeovers += 1
        self.assign(living)

    def start(self) -> None:
        self.lives += 1
        model = {tensor.name: torch.zeros(tensor.shape) for tensor in TENSORS}
        pulled = {tensor.name: torch.zeros(tensor.shape) for tensor in TENSORS}
        local = WorkerOptimizer(self.job, Held(model=model, pulled=pulled, specs=TENSORS, replicas=self.setup.replicas))
        made = Process(incarnation=self.lives, local=local, model=model, pulled=pulled)
        self.processes.append(made)
        begun = bool(self.owners)
        if not begun:
            self.owners = dict.fromkeys(range(self.setup.replicas), made)
        else:
            self.owners[self.random.randrange(self.setup.replicas)] = made
        self.assign(self.processes)
        if begun and self.setup.goes_back:
            self.roll_back()

    def assign(self, processes: Sequence[Process]) -> None:
        for process in processes:
            owned = tuple(replica for replica, owner in sorted(self.owners.items()) if owner is process)
            if owned != process.replicas:
                process.replicas, process.step = owned, -1

    def roll_back(self) -> None:
        self.counts.rollbacks += 1
        self.timeline += 1
        for shard in self.shards:
            shard.restore(self.committed[1][shard.number])
        self._bound()

    def _bound(self) -> None:
        for shard in self.shards:
            shard.request_cut(self.setup.steps, stop=True)

    def commit(self) -> None:
        for step in range(self.setup.steps, self.committed[0], -1):
            held = {shard.number: shard.cuts.get(step) for shard in self.shards}
            if all(found is not None for found in held.values()):
                cut = {number: found for number, found in held.items() if found is not None}
                check_cut(cut, self.expected[step])
                self.committed = step, cut
                for shard in self.shards:
                    shard.cuts.release(step)
                return

    # Workers

    def state(self, sender: Sender, shard: int, step: int, buckets: Sequence[int] = ()) -> Sequence[BucketImage] | None:
        """See Exchanges."""
        if sender.timeline != self.timeline:
            raise Restart
        summing = self.shards[shard].summing
        assert summing is not None
        found = summing.state(step, buckets)
        self.counts.taken += found is not None
        return found

    def bring_state(self, sender: Sender, shard: int, given: Sequence[BucketImage]) -> Outcome:
        """See Exchanges."""
        if self.kills and self.random.random() < 0.2:
            raise Died
        if sender.timeline != self.timeline:
            return Outcome.WRONG_TIMELINE
        summing = self.shards[shard].summing
        assert summing is not None
        return summing.bring(given).outcome

    def work(self, process: Process) -> None:
        if process.step < 0 or process.timeline != self.timeline:
            self.locate(process)
        elif process.to_push:
            replica, shard = process.to_push.pop(self.random.randrange(len(process.to_push)))
            message = process.timeline, process.incarnation, process.step, replica, shard, process.gradients[replica]
            self.sent.append(message)
            if self.random.random() < 0.9:
                self.deliver(*message)
            else:
                # It is lost, and pushed again.
                process.to_push.append((replica, shard))
        elif process.to_pull:
            self.pull(process, process.step + 1)

    def locate(self, process: Process) -> None:
        if not process.replicas:
            return
        standings = [[shard.mode.progress(replica) for replica in process.replicas] for shard in self.shards]
        step = min(map(min, standings))
        if process.timeline != self.timeline:
            who = Identity(f"worker/{process.incarnation}", process.incarnation)
            sender = Sender(job=self.job.name, timeline=self.timeline, plan_id=self.plan.plan_id, who=who)
            states = ServerStates(self, lambda: sender)
            process.local.meet(
                self.plan, ModelLayout(self.plan, process.model), ModelLayout(self.plan, process.pulled), states
            )
        process.local.own(Share(self.plan, process.replicas))
        process.timeline, process.wanting = self.timeline, []
        for shard in self.shards:
            if not self.load(process, shard, step):
                return
        process.local.began(step)
        try:
            process.local.arrived(step, Told(located=True, wants_state=process.wanting))
        except Restart:
            return
        self.begin(process, step)

    def load(self, process: Process, shard: Shard, step: int) -> bool:
        if not all(bucket.step in (step, step + 1) and bucket.oldest <= step for bucket in shard.buckets):
            return False
        layout = ModelLayout(self.plan, process.pulled)
        for bucket in shard.buckets:
            layout.load(shard.number, bucket.number, bucket.values_at(step))
        assert shard.summing is not None
        if shard.summing.wants_state() and shard.step_min == step:
            process.wanting.append(shard.number)
        return True

    def begin(self, process: Process, step: int) -> None:
        right = self.expected[min(step, self.setup.steps)]
        for shard in self.shards:
            for image, wanted in zip(process.local.images(shard.number), right[shard.number], strict=True):
                for name, values in wanted.tensors.items():
                    where = f"worker {process.incarnation} at step {step}"
                    require(torch.equal(image.tensors[name], values), f"{where} has another {name}")
        process.step, process.to_push, process.wanting = step, [], []
        process.to_pull = [shard.number for shard in self.shards]
        if step == self.setup.steps:
            process.to_pull = []
            return
        process.gradients = {}
        for replica in process.replicas:
            process.local.enter(replica, 0)
            gradients = gradient_of(process.model, step, replica)
            process.gradients[replica] = dict(process.local.take(replica, 0, Outgoing(values=gradients)).values)
            process.to_push += [(replica, shard.number) for shard in self.shards]

    def deliver(
        self, timeline: int, incarnation: int, step: int, replica: int, shard: int, gradients: dict[str, torch.Tensor]
    ) -> None:
        members = {process.incarnation for process in self.processes}
        if timeline != self.timeline or incarnation not in members:
            return
        for bucket in self.shards[shard].buckets:
            given = contribution(self.plan, shard, bucket.number, gradients)
            decision = self.shards[shard].contribute(bucket.number, step, Block(replica, 1), given)
            require(decision.outcome is not Outcome.REFUSED, decision.reason)
            self.counts.duplicates += decision.outcome is Outcome.DUPLICATE

    def pull(self, process: Process, step: int) -> None:
        number = self.random.choice(process.to_pull)
        shard = self.shards[number]
        if shard.step_min < step:
            return
        if not self.load(process, shard, step):
            process.step = -1
            return
        process.to_pull.remove(number)
        if not process.to_pull:
            process.local.began(step)
            process.local.arrived(step, Told(wants_state=process.wanting))
            self.counts.applied += 1
            self.begin(process, step)
