"""Pipelines under kills: real shards, mailboxes, schedules and units of work, without a network.

The chief assigns units (Work), decides whether the job goes back (ErrorMemory), and tells each worker the posts, which
hears of them late. A worker looks for its step, computes passes in its schedule's order as parcels come (Mailbox),
pushes each replica's gradient to each shard, and pulls. Any process may be killed, or only seem to be, in which case it
goes on until it is told. Parcels and pushes are lost, repeated, and delivered late. Every action is atomic.

What a stage computes is a product and a sum per parameter, so that each parcel and each gradient depends on the very
parameters, and two orders of doing it differ in bits.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

import shardline_pipeline as pipeline
from shardline.cadence import Held
from shardline.client.applied.worker_optimizer import WorkerOptimizer
from shardline.client.layout import ModelLayout
from shardline.core.identity import Identity
from shardline.core.orders import Orders, Phase
from shardline.core.parcel import Parcel
from shardline.core.placement import Post
from shardline.core.plan import Plan, make_plan
from shardline.core.reduce import Block
from shardline.core.spec import ConsistencySpec, JobSpec, RuleSpec, TensorSpec
from shardline.observability.metrics import Metrics
from shardline.security import key_of
from shardline.update import completed
from shardline_chief.rules.codecs.error_memory import ErrorMemory, goes_back
from shardline_chief.rules.state.state import Work
from shardline_pipeline.activations.mailbox import Mailbox
from shardline_pipeline.hosts import Hosts
from shardline_pipeline.schedules.asynchronous import AsynchronousSchedule
from shardline_ps.shard.shard import Shard
from tests.protocol_model.applied import Cut, check_cut, contribution, images
from tests.protocol_model.numbers import require
from tests.support.builders import make_job_spec, make_settings

RULE = completed(RuleSpec(name="SGD", groups=({"lr": 0.05, "momentum": 0.9},)))
METRICS = Metrics("worker", "worker/0")
Unit = tuple[int, int]
"""(stage, replica)."""
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PipelineSetup:
    seed: int
    pipeline: str
    apply: str = "server"
    consistency: str = "sync"
    stages: int = 3
    replicas: int = 1
    hosts: Hosts = ()
    microbatches: int = 2
    workers: int = 3
    steps: int = 8
    every: int = 3
    kills: int = 4
    losses: int = 1
    """Servers that are lost."""
    chiefs: int = 1
    """Chiefs that are killed."""
    # Rules that can be broken, to see that they are needed.
    decides: bool = True
    """The chief takes the job back to a checkpoint when ErrorMemory says so."""
    starts_over: bool = True
    """Every worker begins its step again when any post changes, not only those whose own units do."""
    alike: bool = True
    """All workers compute the step that some replica lacks, for each replica that they have, counted or not."""
    looks: bool = True
    """Who waits for a parcel asks for Progress meanwhile."""
    ends: bool = True
    """A stage that keeps one version of its parameters ends a step when no forward pass needs the one it has."""
    waits: bool = True
    """A parcel by newer orders than those of its receiver waits."""
    standbys: bool = False
    """Each shard has one, which takes its place when its server is lost."""
    withholds: bool = True
    """Where replicas don't wait for each other, nobody takes a stage over in a timeline in which another had it."""
    fences: bool = True
    """Parcels of earlier timelines are told apart."""


@dataclass
class PipelineCounts:
    schedules: int = 0
    kills: int = 0
    zombies: int = 0
    rollbacks: int = 0
    moves: int = 0
    chiefs: int = 0
    looked: int = 0
    rested: int = 0
    """Workers that found their step closed while they waited for a parcel."""
    passes: int = 0
    late: int = 0
    """Parcels that came too late, or from a life that nobody expects."""
    duplicates: int = 0
    hosted: int = 0
    """Times that a worker began a step with several stages of a replica."""


# What stages compute


def tensor(stage: int) -> str:
    return f"{stage}.weight"


def entered(step: int, replica: int, microbatch: int) -> torch.Tensor:
    return torch.tensor([0.1 + 0.01 * ((step * 5 + replica * 3 + microbatch * 7) % 11)])


def forward(weight: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return weight[:1] * given + weight[1:]


def backward(weight: torch.Tensor, given: torch.Tensor, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the weight and of what was given."""
    return torch.cat([back * given, back]), back * weight[:1]


def end(output: torch.Tensor) -> torch.Tensor:
    """What the last stage's output gets back from the loss."""
    return output * 0.1


class Alone:
    """The same training in one process, from the checkpoints that the job went back to."""

    def __init__(self, setup: PipelineSetup, job: JobSpec, plan: Plan) -> None:
        self.setup = setup
        self.schedule = pipeline.of(job)
        self.layout = pipeline.layout_of(job)
        self.plan = plan
        self.shards = make_shards(setup, plan, aggregates=False)
        self.cuts: list[Cut] = [images(self.shards)]
        self.weights: list[Values] = [self.values()]
        """The parameters of each step."""
        self.train(0)

    def values(self) -> Values:
        found = {tensor(stage): torch.zeros(2) for stage in range(self.setup.stages)}
        layout = ModelLayout(self.plan, found)
        for shard in self.shards:
            for bucket in shard.buckets:
                layout.load(shard.number, bucket.number, bucket.values)
        return found

    def train(self, first: int) -> None:
        """Begin at a step, with an empty pipeline."""
        setup, self.first = self.setup, first
        del self.cuts[first + 1 :], self.weights[first + 1 :]
        for shard in self.shards:
            shard.restore(self.cuts[first][shard.number])
        for step in range(first, setup.steps):
            for replica in range(setup.replicas):
                gradients = self.gradients(step, replica)
                for shard in self.shards:
                    for bucket in shard.buckets:
                        given = contribution(self.plan, shard.number, bucket.number, gradients)
                        shard.contribute(bucket.number, step, Block(replica, 1), given)
            self.cuts.append(images(self.shards))
            self.weights.append(self.values())

    def gradients(self, step: int, replica: int) -> Values:
        setup = self.setup
        total = {tensor(stage): torch.zeros(2) for stage in range(setup.stages)}
        for microbatch in range(setup.microbatches):
            number = self.layout.number(step * setup.microbatches + microbatch, replica)
            given = [entered(step, replica, microbatch)]
            for stage in range(setup.stages):
                given.append(forward(self.used(number, stage, back=False), given[-1]))
            if self.schedule.recompute:
                given[-1] = forward(self.used(number, setup.stages - 1, back=True), given[-2])
            back = end(given[-1])
            for stage in reversed(range(setup.stages)):
                gradient, back = backward(self.used(number, stage, back=True), given[stage], back)
                total[tensor(stage)] += gradient
        return total

    def used(self, number: int, stage: int, *, back: bool) -> torch.Tensor:
        """The parameters with which a microbatch is computed in a stage."""
        version = self.schedule.back_version if back else self.schedule.version
        found = version(number, stage, self.layout, first=self.first)
        return self.weights[found][tensor(stage)]


def make_shards(setup: PipelineSetup, plan: Plan, *, aggregates: bool, consistency: str = "sync") -> list[Shard]:
    settings = make_settings(
        plan,
        rule=RULE,
        replicas=setup.replicas,
        cut_every=setup.every,
        aggregates=aggregates,
        consistency=ConsistencySpec(mode=consistency),
    )
    shards = [Shard(number, settings) for number in range(len(plan.shards))]
    for shard in shards:
        for bucket in shard.buckets:
            shard.initialize(bucket.number, torch.arange(1.0, 1.0 + bucket.spec.elements) / 3.0 + 0.1 * shard.number)
    return shards


# Tasks


@dataclass
class Chain:
    """What a worker does for one stage of one replica. Microbatches are counted from the job's first one."""

    stage: int
    replica: int
    todo: deque[tuple[int, bool]] = field(default_factory=deque)
    """With a flush: the passes of the step."""
    forward: int = 0
    backward: int = 0
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """What a forward pass got, and what it made."""
    gradient: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


@dataclass
class Process:
    """One life of a worker."""

    who: Identity
    mailbox: Mailbox
    local: WorkerOptimizer | None
    model: Values
    pulled: Values
    alive: bool = True
    orders: Orders = field(default_factory=Orders)
    """As heard."""
    begun: Orders = field(default_factory=Orders)
    """Of the open step."""
    step: int = -1
    """-1: to be looked for."""
    all_began: bool = False
    """See StageRunner."""
    first: int = 0
    """The step at which the pipeline was empty."""
    met: int = -1
    """The timeline of which the optimizer has met the servers."""
    chains: dict[Unit, Chain] = field(default_factory=dict)
    versions: dict[int, Values] = field(default_factory=dict)
    to_push: list[tuple[int, int]] = field(default_factory=list)
    """(replica, shard)."""
    to_pull: list[int] = field(default_factory=list)
    """Shards."""
    computing: bool = False
    gradients: dict[int, Values] = field(default_factory=dict)
    wanting: list[int] = field(default_factory=list)

    def own(self, job: JobSpec) -> Mapping[int, tuple[int, ...]]:
        """Stages by replica, of the open step."""
        return pipeline.by_replica(job, self.begun.units(self.who.task))


@dataclass(frozen=True)
class Message:
    """A parcel under way, with the timeline that it was computed in, and the life that it goes to."""

    who: Identity
    to: int
    timeline: int
    posting: int
    parcel: Parcel


class PipelineChief:
    """The chief and the shards, and which processes there are."""

    def __init__(self, setup: PipelineSetup) -> None:
        self.setup = setup
        self.random = random.Random(setup.seed)
        self.counts = PipelineCounts(schedules=1)
        tensors = tuple(
            TensorSpec(name=tensor(stage), shape=(2,), dtype="float32", fragment=stage) for stage in range(setup.stages)
        )
        self.job: JobSpec = make_job_spec(
            tensors=tensors,
            rule=RULE,
            replicas=setup.replicas,
            hosts=setup.hosts,
            steps=setup.steps,
            pipeline=setup.pipeline,
            accumulate=setup.microbatches,
            apply=setup.apply,
            consistency=ConsistencySpec(mode=setup.consistency),
        )
        self.schedule = pipeline.of(self.job)
        self.layout = pipeline.layout_of(self.job)
        self.plan = make_plan(tensors, 2)
        self.alone = Alone(setup, self.job, self.plan)
        aggregates = setup.apply == "worker"
        self.shards = make_shards(setup, self.plan, aggregates=aggregates, consistency=setup.consistency)
        self.committed: tuple[int, Cut] = 0, images(self.shards)
        self.timeline, self.lives, self.term = 1, 0, 0
        self.kills, self.losses, self.chiefs = setup.kills, setup.losses, setup.chiefs
        self.members: dict[str, Process] = {}
        """Lives that the chief knows and no server has fenced."""
        self.processes: list[Process] = []
        """All that still do something, zombies included."""
        self.net: list[Message] = []
        self.pushes: list[tuple[Process, int, int, int, int, Values]] = []
        """All that were ever sent: they may come again."""
        self.orders = Orders(phase=Phase.RUNNING, timeline=1)
        self.take_office()
        for _ in range(setup.workers):
            self.start()
        self.bound()

    def kill(self) -> None:
        """A worker dies, or seems to: that one goes on until it is told."""
        living = [one for one in self.members.values() if one.alive]
        if not living:
            return
        self.kills -= 1
        self.counts.kills += 1
        process = self.random.choice(living)
        process.alive = False
        if self.random.random() < 0.5:
            self.processes.remove(process)
            # What it had not sent is lost with it.
            self.net = [one for one in self.net if one.who != process.who or self.random.random() < 0.5]
        else:
            self.counts.zombies += 1

    # The chief

    def take_office(self) -> None:
        """A chief, with nothing but what the servers and the journal know."""
        self.assigned = Work()
        self.term += 1
        recovery = SimpleNamespace(hopeless=lambda: "", again=lambda why, now_s: self.roll_back())
        self.chief = SimpleNamespace(
            work=self.assigned,
            job=self.job,
            exact_memory=False,
            remembers=False,
            saves=SimpleNamespace(checkpoint_step=self.committed[0]),
        )
        self.memory = ErrorMemory(cast(Any, self.chief), cast(Any, recovery), cast(Any, None))
        if self.term > 1 and goes_back(cast(Any, self.chief)) and self.setup.decides:
            # See Takeover: it does not know who had which state.
            self.roll_back()

    def start(self) -> None:
        """A new process joins in a place where nobody lives."""
        free = [f"worker/{n}" for n in range(self.setup.workers) if not self.living(f"worker/{n}")]
        if not free:
            return
        self.lives += 1
        who = Identity(self.random.choice(free), self.lives, f"{self.lives}".encode().ljust(32, b"."))
        model, pulled = ({one.name: torch.zeros(2) for one in self.job.tensors} for _ in range(2))
        local = None
        if self.setup.apply == "worker":
            held = Held(model=model, pulled=pulled, specs=self.job.tensors, replicas=self.setup.replicas)
            local = WorkerOptimizer(self.job, held)
        process = Process(
            who=who,
            mailbox=Mailbox(who.task, METRICS, 1e9, still_open=lambda key: True),
            local=local,
            model=model,
            pulled=pulled,
        )
        self.members[who.task] = process
        self.processes.append(process)
        self.assign()

    def living(self, task: str) -> bool:
        return task in self.members and self.members[task].alive

    def notice(self) -> None:
        """Fence the dead on all servers, then give their units to others."""
        if any(not one.alive for one in self.members.values()):
            self.members = {task: one for task, one in self.members.items() if one.alive}
            self.assign()

    def assign(self) -> None:
        """Give the units to the members, and tell who has which."""
        members = dict(sorted(self.members.items()))
        if not members:
            return
        lives = {task: one.who.incarnation for task, one in members.items()}
        machines = dict.fromkeys(members, "here")
        self.counts.moves += bool(self.assigned.reassign(lives, self.job, machines=machines, own=False))
        self.tell()

    def tell(self) -> None:
        """Give all the orders that are in force now; they hear of them later."""
        if not self.assigned.assignment.items() or not set(self.assigned.assignment.values()) <= self.members.keys():
            return
        posts = []
        for _, task in sorted(self.assigned.assignment.items()):
            who = self.members[task].who
            posts.append(Post(task=task, address=f"{task}:1", incarnation=who.incarnation, key=key_of(who.secret)))
        posting = (self.term << 32) + self.assigned.postings
        self.orders = Orders(phase=Phase.RUNNING, timeline=self.timeline, posts=tuple(posts), posting=posting)

    def decide(self) -> None:
        """Whether the job goes back, since other lives have units."""
        if self.setup.decides:
            self.memory.moved(cast(Any, None), 0.0)

    def roll_back(self) -> None:
        self.counts.rollbacks += 1
        self.timeline += 1
        step, cut = self.committed
        for shard in self.shards:
            shard.restore(cut[shard.number])
        found = {bucket.step for shard in self.shards for bucket in shard.buckets}
        require(found == {step}, f"after going back to step {step}, stages are at steps {sorted(found)}")
        self.assigned.moved.clear()
        self.assigned.unready.clear()
        if isinstance(self.schedule, AsynchronousSchedule):
            self.alone.train(step)
        self.bound()
        self.tell()

    def bound(self) -> None:
        for shard in self.shards:
            shard.request_cut(self.setup.steps, stop=True)

    def commit(self) -> None:
        for step in range(self.setup.steps, self.committed[0], -1):
            held = {shard.number: shard.cuts.get(step) for shard in self.shards}
            if all(found is not None for found in held.values()):
                cut = {number: found for number, found in held.items() if found is not None}
                check_cut(cut, self.alone.cuts[step])
                self.committed = step, cut
                self.chief.saves.checkpoint_step = step
                for shard in self.shards:
                    shard.cuts.release(step)
                return
