"""A job under the virtual clock: the classes of its consistency mode and its update rule, virtual workers and links."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import shardline_pipeline as pipeline
from shardline import cadence as cadences, codecs, consistency, topology as topologies
from shardline.cluster import ANY_HOST
from shardline.codecs import coding_of
from shardline.consistency.assignment import assign, replicas_of
from shardline.consistency.server import Terms
from shardline.core.plan import Plan, make_plan
from shardline.core.reduce import clip_scale, global_norm
from shardline.core.shares import uneven_shares
from shardline.core.spec import JobSpec, TensorKind
from shardline.errors import UsageError
from shardline.topology import Flat, Hop, Surroundings
from shardline.update import weights
from shardline_lab.simulator.aggregators import VirtualAggregator
from shardline_lab.simulator.clock import VirtualClock
from shardline_lab.simulator.links import Machines, MessageStream, Network
from shardline_lab.simulator.result import Result, RunCounts
from shardline_lab.simulator.servers import BucketPlan, VirtualServer
from shardline_lab.simulator.times import Gamma, Times, draws
from shardline_lab.simulator.workers import Gradients, VirtualWorker

PIECES = 8
"""Most buckets of a server in a simulation of the timing alone: enough to see pushes and pulls overlap."""


@dataclass(frozen=True, kw_only=True)
class Death:
    """A worker that dies, and when it is started again."""

    worker: int
    at_s: float
    back_s: float | None = None
    """Seconds after its death; None = never."""


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What the stages of a pipeline cost. Stage s has number s modulo the count of each list."""

    times: Sequence[Times]
    """Of one microbatch, forward and backward."""
    forward: Sequence[float] = (1 / 3,)
    """Share of the forward pass in it."""
    parcel_bytes: Sequence[float] = (0.0,)
    """Of the activation that a stage sends."""
    gradient_bytes: Sequence[float] = ()
    """Of the gradient that comes back for it; () = as many."""
    parcel_s: float = 0.0
    """Time of a parcel besides the links, in seconds."""

    def forward_of(self, stage: int) -> float:
        """Share of the forward pass in a stage's time."""
        return self.forward[stage % len(self.forward)]

    def whole(self, microbatches: int, cv: float) -> tuple[Gamma, ...]:
        """Times of a worker that has the whole model, which is as many stages as there are times."""
        return (Gamma(microbatches * sum(times.mean_s for times in self.times), cv),)

    def bytes_to(self, stage: int, *, back: bool) -> float:
        sizes, sender = (self.gradient_bytes or self.parcel_bytes, stage) if back else (self.parcel_bytes, stage - 1)
        return sizes[sender % len(sizes)]


@dataclass(frozen=True, kw_only=True)
class Setup:
    job: JobSpec
    workers: int
    times: Sequence[Times]
    """Of one pass; worker i has number i modulo their count."""
    servers: int = 1
    steps: int = 0
    """0 = the job's."""
    network: Network = field(default_factory=Network)
    machines: Mapping[str, str] = field(default_factory=dict)
    """The machine of a task; a task that is missing here has one of its own."""
    aggregators: int = 0
    """Of the cluster."""
    racks: Mapping[str, str] = field(default_factory=dict)
    """Of machines, where they are known."""
    overlap: bool = True
    """Gradients leave during the backward pass, and the forward pass waits layer by layer, where the job allows it."""
    exchange_s: float = 0.0
    """Time of a worker's exchange besides the links, in seconds: coding, calls, the servers' work."""
    stages: StageCosts | None = None
    """What the stages of a pipeline cost; `times` is not used then."""
    deaths: Sequence[Death] = ()
    fence_s: float = 20.0
    """Seconds until the job goes on without a dead worker."""
    seed: int = 0

    def __post_init__(self) -> None:
        if topologies.of(self.job).meets and self.deaths:
            raise UsageError(f"deaths with topology {self.job.topology} can't be simulated; choose {Flat()}")
        if pipeline.ranks(self.job) > 1:
            raise UsageError(
                "layers that workers share can't be simulated; --set tensor_ranks=1 simulates the same job with "
                "workers that have whole layers"
            )
        for what, count in (("workers", self.workers), ("servers", self.servers), ("steps", self.steps or 1)):
            if count < 1:
                raise UsageError(f"a simulation with {count} {what}; give at least 1")
        for death in self.deaths:
            if not 0 <= death.worker < self.workers:
                last = self.workers - 1
                raise UsageError(
                    f"worker/{death.worker} can't die: the simulated workers are "
                    f"{f'worker/0 to worker/{last}' if last else 'worker/0 alone'}"
                )

    def machine(self, task: str) -> str:
        return self.machines.get(task, task)

    def hops(self, worker: int) -> Mapping[int, Hop]:
        """The task that a worker exchanges with, by server, as the job's topology says."""
        workers, aggregators = (
            [f"{role}/{number}" for number in range(count)]
            for role, count in (("worker", self.workers), ("aggregator", self.aggregators))
        )
        near = [task for task in workers if self.machine(task) == self.machine(f"worker/{worker}")]
        racks = {task: self.racks.get(self.machine(task), "") for task in (*workers, *aggregators)}
        around = Surroundings(
            task=f"worker/{worker}",
            workers=self.workers,
            servers={number: Hop(f"ps/{number}", "") for number in range(self.servers)},
            aggregators={number: Hop(task, "") for number, task in enumerate(aggregators)},
            places=self.aggregators,
            racks=racks,
            neighbours=tuple(near),
            speaker=Hop(near[0], ""),
        )
        return topologies.of(self.job).hops(around)

    def plan(self) -> Plan:
        """How the job's tensors are cut over the servers, as the chief would."""
        servers, workers = (
            [self.machine(f"{role}/{index}") for index in range(count)]
            for role, count in (("ps", self.servers), ("worker", self.workers))
        )
        return make_plan(self.job.tensors, self.servers, shares=uneven_shares(servers, workers) or None)


def placed(servers: Sequence[str], workers: Sequence[str], aggregators: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a Setup with tasks on these machines; "*" is one of its own. Leaves out servers that hold nothing."""
    if ANY_HOST not in {*servers, *workers} and (shares := uneven_shares(servers, workers)):
        servers = [host for host, share in zip(servers, shares, strict=True) if share]
    roles = {"ps": servers, "worker": workers, "aggregator": aggregators}
    machines = {f"{role}/{index}": host for role in roles for index, host in enumerate(roles[role]) if host != ANY_HOST}
    return {"workers": len(workers), "servers": len(servers), "aggregators": len(aggregators), "machines": machines}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the servers hold, and what virtual workers compute with."""

    plan: Plan
    buckets: Sequence[Sequence[BucketPlan]]
    """By server."""
    gradients: Callable[[int], Gradients] | None = None
    """Makes what a worker, by its number, computes with; None = only the timing is simulated."""


def timing_contents(setup: Setup) -> Contents:
    """The bytes of each server, in as many buckets as the timing needs."""
    plan = setup.plan()
    servers = []
    for number in range(len(plan.shards)):
        pushes, pulls = (
            list(zip(*sizes, strict=True)) for sizes in zip(*coded_bytes(setup.job, plan, number), strict=True)
        )
        # Without limited links everything arrives at once.
        most = max(sum(size > 0 for size in sizes) for sizes in pulls) if setup.network.limited else 1
        count = max(1, min(PIECES, most))
        push, pull = ([sum(sizes) / count for sizes in each] for each in (pushes, pulls))
        servers.append([BucketPlan(push_bytes=push, pull_bytes=pull)] * count)
    return Contents(plan=plan, buckets=servers)


def coded_bytes(job: JobSpec, plan: Plan, server: int) -> list[tuple[list[int], list[int]]]:
    """By bucket of a server: bytes of one contribution, and of the parameters, as the job's codec writes them.

    Of each step in which another fragment is exchanged: see BucketPlan.push_bytes.
    """
    coding, fragments = coding_of(job, plan), range(cadences.of(job).rounds.fragments)
    found = []
    for number, bucket in enumerate(plan.shards[server].buckets):
        own = plan.tensors[bucket.slices[0].tensor].fragment
        always, never = bucket.kind is TensorKind.BUFFER, bucket.kind is TensorKind.FROZEN
        goes = [not never and (always or fragment == own) for fragment in fragments]
        push, pull = (way.bucket(server, number).usual_bytes for way in (coding.push, coding.pull))
        found.append(([push * there for there in goes], [pull * there for there in goes]))
    return found


class VirtualServers(ABC):
    """The servers of a run, whose mode decides what counts and when it is applied, and what their steps come to."""

    def __init__(self, setup: Setup, plan: Plan, buckets: Sequence[Sequence[BucketPlan]]) -> None:
        """buckets: by server."""
        job = setup.job
        self.setup = setup
        self.clock = VirtualClock()
        self.steps = setup.steps or job.steps
        self.tally = RunCounts()
        self.mode = consistency.of(job.consistency)
        replicas, policy = job.replicas, job.consistency.nan_policy
        terms = Terms(plan=plan, contributors=replicas, nan_policy=policy, weights=weights(job.rule))
        self.servers = [
            VirtualServer(
                number, own, self.mode, terms, on_step=self._published, on_complete=self.vote, on_choice=self.ask
            )
            for number, own in enumerate(buckets)
        ]
        self._buckets = sum(map(len, buckets))
        self._published_at: Counter[int] = Counter()
        """Buckets that have published a step."""

    def _published(self, step: int) -> None:
        self._published_at[step] += 1
        if self._published_at[step] == self._buckets:
            del self._published_at[step]
            self.tally.step_ends_s.append(self.clock.now_s)
            self.tally.traffic.append(self.traffic())
            self.clock.stopped = step >= self.steps

    @abstractmethod
    def traffic(self) -> tuple[float, int, int]:
        """See RunCounts.traffic."""

    @abstractmethod
    def ask(self, server: VirtualServer, step: int) -> None:
        """A server asks the lead whose gradients make a step."""

    @abstractmethod
    def vote(self) -> None:
        """A step of some server waits for a verdict of all."""


class Simulation(VirtualServers):
    """One run. What counts, when it is applied and who waits is decided by the job's mode, at virtual times."""

    def __init__(self, setup: Setup, contents: Contents | None = None) -> None:
        contents = timing_contents(setup) if contents is None else contents
        super().__init__(setup, contents.plan, contents.buckets)
        job, mode = setup.job, self.mode
        self._cadence = cadences.of(job)
        self.numbered = mode.intake.number(1) is not None
        # Whether a worker decides about all of its gradient before it sends any of it.
        streams = self._cadence.sends is cadences.Sends.GRADIENTS and not (
            not mode.worker_half(job).shares_steps
            and (job.consistency.clip_norm > 0.0 or job.consistency.nan_policy == "skip")
        )
        self.overlap = setup.overlap and setup.network.limited and streams
        self.exchange_s = setup.exchange_s
        self.sums_blocks = mode.intake.place(0) is not None and all(codec.exact for codec in codecs.of(job).ups)
        self._asking: list[tuple[VirtualServer, int]] = []
        """Servers that wait for the lead's choice of a step."""
        self.workers = self._make_workers(contents)
        self._assignment: dict[int, str] = {}

    def _make_workers(self, contents: Contents) -> list[VirtualWorker]:
        setup, machines = self.setup, Machines(self.clock, self.setup.network)
        servers = [f"ps/{server.number}" for server in self.servers]
        made, sums = [], self._sum_bytes(contents)

        def streams(task: str, others: Sequence[str]) -> tuple[list[MessageStream], list[MessageStream]]:
            here, there = setup.machine(task), [setup.machine(one) for one in others]
            return [machines.stream(here, one) for one in there], [machines.stream(one, here) for one in there]

        aggregators: dict[str, VirtualAggregator] = {}
        for index in range(setup.workers):
            task, hops = f"worker/{index}", setup.hops(index)
            met = {number: hop.task for number, hop in hops.items() if hop.task != f"ps/{number}"}
            for name in {*met.values()} - {*aggregators}:
                aggregators[name] = VirtualAggregator(name, self, streams(name, servers), sums, setup.job.replicas)
            up, down = streams(task, [hops[server.number].task for server in self.servers])
            worker = VirtualWorker(
                index,
                self,
                self.mode.worker_half(setup.job),
                draws(setup.times[index % len(setup.times)], setup.seed, index, self.passes_drawn),
                (up, down),
                contents.gradients(index) if contents.gradients is not None else None,
                {number: aggregators[name].take_in for number, name in met.items()},
            )
            for name in {*met.values()}:
                aggregators[name].members[worker] = dict(enumerate(down))
            made.append(worker)
        return made

    def _sum_bytes(self, contents: Contents) -> Sequence[Sequence[Sequence[float]]]:
        """Bytes of a sum, by server and bucket: what codecs have rounded leaves an aggregator as it is."""
        if not self.sums_blocks and contents.gradients is None:
            tensors = tuple(replace(tensor, codec="") for tensor in self.setup.job.tensors)
            raw = replace(self.setup.job, codec="raw", codec_up="", tensors=tensors)
            contents = timing_contents(replace(self.setup, job=raw))
        return [[bucket.push_bytes for bucket in buckets] for buckets in contents.buckets]

    def run(self) -> Result:
        """Simulate until the job's last step. Raises UsageError if it can't get there."""
        self._admit()
        for death in self.setup.deaths:
            self.clock.at(death.at_s, self._die, death)
        self.clock.run()
        if len(self.tally.step_ends_s) < self.steps:
            raise UsageError(
                f"the simulated job stands still after step {len(self.tally.step_ends_s)} of {self.steps}, at "
                f"{self.clock.now_s:.1f} s: no worker is left that it waits for; let one come back (back=SECONDS)"
            )
        return result(self)

    # Steps

    @property
    def passes_drawn(self) -> int:
        """Passes that one compute time stands for."""
        return self._cadence.rounds.ticks if self._cadence.rounds.uniform else 1

    @property
    def passes_used(self) -> int:
        """Passes whose gradients are in the job's steps so far."""
        if self.numbered:
            return self.servers[0].storage.tally.pushes * self._cadence.rounds.ticks
        return self.mode.needed(self.setup.job.replicas) * self._cadence.rounds.ticks_before(
            len(self.tally.step_ends_s)
        )

    def draws_in(self, step: int) -> int:
        return 1 if self._cadence.rounds.uniform else self._cadence.rounds.ticks_in(step)

    def ahead_in(self, step: int) -> float:
        return self._cadence.rounds.overlap / self._cadence.rounds.ticks_in(step)

    def traffic(self) -> tuple[float, int, int]:
        counts, servers = self.tally, [one.storage.tally for one in self.servers]
        pushes, staleness = sum(one.pushes for one in servers), sum(one.staleness_sum for one in servers)
        return counts.push_bytes + counts.pull_bytes, pushes, staleness

    def ask(self, server: VirtualServer, step: int) -> None:
        self._asking.append((server, step))
        self._tell()

    def _tell(self) -> None:
        """Answer those whose step the lead has chosen for, one exchange later."""
        lead = self.servers[0].choices if self._asking else None
        asking, self._asking = self._asking, []
        for server, step in asking:
            choice = lead.of(step) if lead is not None else None
            if choice is None:
                self._asking.append((server, step))
            else:
                self.clock.after(2 * self.setup.network.latency_s, self._adopt, server, step, choice)

    def _adopt(self, server: VirtualServer, step: int, choice: int) -> None:
        assert server.choices is not None
        server.choices.adopt(step, choice)
        server.settle()

    def vote(self) -> None:
        self._tell()
        if all(server.completed for server in self.servers):
            self.clock.after(2 * self.setup.network.latency_s, self._decide)

    def _decide(self) -> None:
        votes = [server.vote() for server in self.servers]
        if any(vote is None for vote in votes):
            return
        known = [vote for vote in votes if vote is not None]
        terms = self.setup.job.consistency
        norm = global_norm([square for vote, _ in known for square in vote.sums])
        scale = clip_scale(norm, terms.clip_norm) if terms.clip_norm > 0.0 else 1.0
        skip = terms.nan_policy == "skip" and any(vote.nonfinite for vote, _ in known)
        for server, (_, staged) in zip(self.servers, known, strict=True):
            server.apply_verdict(staged, scale=scale, skip=skip)
        for server in self.servers:
            server.settle()

    # Who takes part

    def _admit(self) -> None:
        living = [worker.task for worker in self.workers if worker.alive]
        for server in self.servers:
            server.members_changed(living)
        if self.mode.assigns_replicas:
            self._assignment = assign(self._assignment, living, self.setup.job.replicas)
        changed = []
        for worker in self.workers:
            owned = replicas_of(self._assignment, worker.task) if self.mode.assigns_replicas else (0,)
            if worker.alive and (owned != worker.owned or worker.idle):
                worker.owned = owned
                changed.append(worker)
        for worker in changed:
            worker.begin()
        for server in self.servers:
            server.settle()

    def _die(self, death: Death) -> None:
        worker = self.workers[death.worker]
        worker.die()
        incarnation = worker.incarnation

        def fence() -> None:
            # The job goes on without a dead worker, unless it is back already.
            if worker.incarnation == incarnation:
                self._admit()

        def come_back() -> None:
            worker.revive(self.mode.worker_half(self.setup.job))
            self._admit()

        self.clock.after(self.setup.fence_s, fence)
        if death.back_s is not None:
            self.clock.after(death.back_s, come_back)


def result(simulation: Simulation) -> Result:
    setup, tally, now_s = simulation.setup, simulation.tally, simulation.clock.now_s
    busy_s = sum(worker.busy_s for worker in simulation.workers)
    return Result(
        step_ends_s=tuple(tally.step_ends_s),
        passes=sum(worker.passes for worker in simulation.workers) * simulation.passes_drawn,
        passes_used=simulation.passes_used,
        staleness=tally.traffic[-1][2] / max(1, tally.traffic[-1][1]),
        staleness_max=max(server.storage.tally.staleness_max for server in simulation.servers),
        push_bytes=tally.push_bytes,
        pull_bytes=tally.pull_bytes,
        computing=busy_s / (now_s * setup.workers),
        traffic=tuple(tally.traffic),
        losses=tuple(tally.losses),
    )
