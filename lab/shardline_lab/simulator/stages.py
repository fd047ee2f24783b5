"""A pipeline under the virtual clock: the schedule's own passes, virtual links, servers with the job's mode.

Every worker computes passes of its units as soon as what they need has come, hands parcels to its neighbours, and
exchanges the parameters of its own stages. See shardline_pipeline.runner and shardline_pipeline.stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import shardline_pipeline as pipeline
from shardline import consistency
from shardline.codecs import coding_of
from shardline.consistency import Gives
from shardline.consistency.assignment import assign, replicas_of
from shardline.core.orders import PassReport
from shardline.core.plan import Plan
from shardline.core.reduce import Block
from shardline.errors import InternalError, UsageError
from shardline_lab.simulator.links import Machines, MessageStream
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.servers import NOTHING, BucketPlan, PulledBucket, VirtualServer
from shardline_lab.simulator.simulation import PIECES, Contents, Setup, Simulation, StageCosts, VirtualServers
from shardline_lab.simulator.times import draws
from shardline_pipeline import Pass
from shardline_pipeline.timeline import Timeline

Unit = tuple[int, int]
"""(stage, replica)."""


def stage_buckets(setup: Setup, plan: Plan) -> list[list[tuple[int, BucketPlan]]]:
    """By server: its buckets, each with its stage, of as many pieces as the timing needs."""
    coding = coding_of(setup.job, plan)
    found = []
    for number, shard in enumerate(plan.shards):
        sizes: dict[int, list[tuple[float, float]]] = {}
        for index, bucket in enumerate(shard.buckets):
            stage = plan.tensors[bucket.slices[0].tensor].fragment
            push, pull = (way.bucket(number, index).usual_bytes for way in (coding.push, coding.pull))
            sizes.setdefault(stage, []).append((push, pull))
        server = []
        for stage, each in sorted(sizes.items()):
            count = min(PIECES, len(each)) if setup.network.limited else 1
            push, pull = (sum(both) / count for both in zip(*each, strict=True))
            server += [(stage, BucketPlan(push_bytes=[push], pull_bytes=[pull]))] * count
        found.append(server)
    return found


@dataclass
class _Unit:
    """One stage of one replica: where it is. Without a flush, microbatches are counted from the job's first one."""

    stage: int
    replica: int
    todo: deque[Pass] = field(default_factory=deque)
    """With a flush: the rest of the open step."""
    forward: int = 0
    """Without a flush: the next forward pass."""
    backward: int = 0
    held: int = 0


class VirtualStages:
    """A worker with the stages that it is assigned. One pass at a time; an exchange runs meanwhile."""

    def __init__(self, task: str, units: Sequence[Unit], simulation: PipelineSimulation) -> None:
        self.task = task
        self.busy_s = 0.0
        self._simulation = simulation
        # The last stages first, as in the runner: what they send back frees memory.
        self._units = [_Unit(stage, replica) for stage, replica in sorted(units, key=lambda unit: (-unit[0], unit[1]))]
        self._here: set[tuple[Unit, int, bool]] = set()
        """Parcels that have come, by the microbatch counted from the job's first one."""
        self._step = 0
        self._version = 0
        """Updates that the parameters which have come had had."""
        self._missing = 0
        """Buckets that are under way."""
        self._busy = False

    def begin(self) -> None:
        """Begin the first step; all parameters are here."""
        self._open()
        self.turn()

    def _open(self) -> None:
        schedule = self._simulation.schedule
        if schedule.flushes:
            for unit in self._units:
                unit.todo.extend(schedule.passes(unit.stage, self._simulation.stages, self._simulation.count))

    # Passes

    def turn(self) -> None:
        """Begin the next pass, or close the step, if there is nothing to wait for."""
        if self._busy or self._step >= self._simulation.steps or not self._units:
            return
        found = self._next()
        if found is not None:
            self._compute(*found)
        elif self._version >= self._step and self._done():
            self._push()

    def _next(self) -> tuple[_Unit, int, bool] | None:
        """Unit, microbatch counted from the job's first one, and if it goes back; None: nothing is ready."""
        for unit in self._units:
            for number, back in self._may_follow(unit):
                last = self._simulation.stages - 1
                alone = unit.stage == last if back else unit.stage == 0
                if alone or ((unit.stage, unit.replica), number, back) in self._here:
                    return unit, number, back
        return None

    def _may_follow(self, unit: _Unit) -> Iterator[tuple[int, bool]]:
        simulation = self._simulation
        if simulation.schedule.flushes:
            if unit.todo and self._version >= self._step:
                yield self._step * simulation.count + unit.todo[0].microbatch, unit.todo[0].back
            return
        layout = simulation.layout
        own = layout.crew(unit.replica, unit.stage)
        crew = [one for one in self._units if one.stage == unit.stage and layout.crew(one.replica, one.stage) == own]
        for back in simulation.schedule.follows(
            unit, crew, unit.stage, layout, step=self._step, steps=simulation.steps
        ):
            number = unit.backward if back else unit.forward
            if simulation.version(number, unit.stage, unit.replica, back=back) <= self._version:
                yield number, back

    def _compute(self, unit: _Unit, number: int, back: bool) -> None:
        self._busy = True
        self._here.discard(((unit.stage, unit.replica), number, back))
        unit.held += not back
        seconds = self._simulation.seconds(unit.stage, unit.replica, number, back)
        self.busy_s += seconds
        self._simulation.clock.at(
            self._simulation.clock.now_s + seconds, self._computed, unit, number, back, self._simulation.clock.now_s
        )

    def _computed(self, unit: _Unit, number: int, back: bool, start_s: float) -> None:
        simulation = self._simulation
        simulation.passed(self.task, unit.stage, unit.replica, number, back=back, start_s=start_s, held=unit.held)
        unit.held -= back
        if simulation.schedule.flushes:
            unit.todo.popleft()
        elif back:
            unit.backward += 1
        else:
            unit.forward += 1
        self._busy = False
        near = unit.stage - 1 if back else unit.stage + 1
        if 0 <= near < simulation.stages:
            simulation.send(self.task, (near, unit.replica), number, back=back)
        self.turn()

    def deliver(self, unit: Unit, number: int, back: bool) -> None:
        self._here.add((unit, number, back))
        self.turn()

    # Exchanges

    def _done(self) -> bool:
        end = (self._step + 1) * self._simulation.count
        flushes = self._simulation.schedule.flushes
        return all(not unit.todo if flushes else unit.backward >= end for unit in self._units)

    def _push(self) -> None:
        """Send the step's gradients; its parameters come when all replicas' have."""
        step, simulation = self._step, self._simulation
        self._step += 1
        self._open()
        own: dict[int, list[int]] = {}
        for unit in self._units:
            own.setdefault(unit.stage, []).append(unit.replica)
        parts = [(server, bucket, own[stage]) for server, bucket, stage in simulation.buckets if stage in own]
        self._missing = len(parts)
        for server, bucket, replicas in parts:
            nbytes = server.plans[bucket].push_bytes[0] * len(replicas)
            simulation.tally.push_bytes += nbytes
            simulation.stream(self.task, f"ps/{server.number}").send(
                nbytes, self._take_in, server, bucket, step, replicas
            )
        self.turn()

    def _take_in(self, server: VirtualServer, bucket: int, step: int, replicas: Sequence[int]) -> None:
        for replica in replicas:
            server.contribute(bucket, step, Block(replica, 1), NOTHING)
        server.pull(bucket, step + 1, self.task, (self._reply, step))
        server.settle()

    def _reply(self, step: int, answer: PulledBucket | None) -> None:
        if answer is None:
            raise InternalError(f"{self.task}: the parameters after step {step} are gone in a simulation")
        simulation = self._simulation
        simulation.tally.pull_bytes += answer.sizes[0]
        simulation.stream(f"ps/{answer.server}", self.task).send(answer.sizes[0], self._arrived)

    def _arrived(self) -> None:
        self._missing -= 1
        if not self._missing:
            self._simulation.clock.after(self._simulation.setup.exchange_s, self._settled)

    def _settled(self) -> None:
        self._version += 1
        self.turn()


class PipelineSimulation(VirtualServers):
    def __init__(self, setup: Setup) -> None:
        job = setup.job
        if setup.stages is None:
            raise UsageError(f"pipeline {job.pipeline}: give the times of its stages (Setup.stages)")
        if setup.deaths:
            raise UsageError(
                f"deaths in pipeline {job.pipeline} can't be simulated; --set pipeline=whole-model simulates them with "
                "workers that have the whole model"
            )
        mode = consistency.of(job.consistency)
        if Gives.COMMON_STEPS not in mode.gives:
            raise UsageError(
                f"consistency {mode} in pipeline {job.pipeline} can't be simulated; simulate it with "
                "--set consistency=sync, in which replicas wait for each other"
            )
        self.costs: StageCosts = setup.stages
        self.schedule = pipeline.of(job)
        pipeline.check_hosts(job.hosts, pipeline.stages(job), job.replicas, workers=setup.workers)
        self.layout = pipeline.layout_of(job)
        self.stages, self.count = self.layout.stages, self.layout.microbatches
        self.schedule.check(self.layout)
        self.parcel_bytes = 0.0
        self.timeline = Timeline(self.stages, job.replicas, self.count)
        plan = setup.plan()
        contents = stage_buckets(setup, plan)
        super().__init__(setup, plan, [[bucket for _, bucket in own] for own in contents])
        self.buckets = [
            (server, number, stage)
            for server, own in zip(self.servers, contents, strict=True)
            for number, (stage, _) in enumerate(own)
        ]
        self._machines = Machines(self.clock, setup.network)
        self._streams: dict[tuple[str, str], MessageStream] = {}
        self._times: dict[Unit, Iterator[float]] = {}
        self._drawn: dict[tuple[Unit, int], float] = {}
        self._stale = [0, 0, 0]
        """Steps of stages, the sum of their staleness, and the highest."""
        self._homes, self.workers = self._make_workers()

    def ask(self, server: VirtualServer, step: int) -> None:
        self.vote()

    def vote(self) -> None:
        raise InternalError(f"consistency {self.mode} decides about all stages at once, which no pipeline takes")

    def traffic(self) -> tuple[float, int, int]:
        counts = self.tally
        return counts.push_bytes + counts.pull_bytes + self.parcel_bytes, self._stale[0], self._stale[1]

    def _make_workers(self) -> tuple[Mapping[Unit, VirtualStages], Sequence[VirtualStages]]:
        job = self.setup.job
        tasks = [f"worker/{index}" for index in range(self.setup.workers)]
        for server in self.servers:
            server.members_changed(tasks)
        named = bool(pipeline.planned(job))
        assignment = pipeline.assigned(job, {}, tasks) if named else assign({}, tasks, pipeline.units(job))
        workers, homes = [], {}
        for task in tasks:
            units = [divmod(unit, job.replicas) for unit in replicas_of(assignment, task)]
            worker = VirtualStages(task, units, self)
            workers.append(worker)
            homes.update(dict.fromkeys(units, worker))
        return homes, workers

    def run(self) -> Result:
        """Simulate until the job's last step."""
        for worker in self.workers:
            self.clock.at(0.0, worker.begin)
        self.clock.run()
        done = len(self.tally.step_ends_s)
        if done < self.steps:
            raise InternalError(f"the simulated pipeline {self.schedule} stands still at step {done} of {self.steps}")
        now_s, job = self.clock.now_s, self.setup.job
        computing = sum(worker.busy_s for worker in self.workers) / (now_s * self.setup.workers)
        passes = self.steps * job.replicas
        return Result(
            step_ends_s=tuple(self.tally.step_ends_s),
            passes=passes,
            passes_used=passes,
            staleness=self._stale[1] / max(1, self._stale[0]),
            staleness_max=self._stale[2],
            push_bytes=self.tally.push_bytes,
            pull_bytes=self.tally.pull_bytes,
            computing=computing,
            traffic=tuple(self.tally.traffic),
            parcel_bytes=self.parcel_bytes,
            stages=self.timeline.figures(),
        )

    # What workers ask for

    def seconds(self, stage: int, replica: int, number: int, back: bool) -> float:
        """How long a pass takes: a part of the time that is drawn for a microbatch in a stage."""
        unit = (stage, replica)
        if not back:
            if unit not in self._times:
                times = self.costs.times[stage % len(self.costs.times)]
                self._times[unit] = draws(times, self.setup.seed, pipeline.unit_of(self.setup.job, stage, replica))
            self._drawn[unit, number] = next(self._times[unit])
            return self.costs.forward_of(stage) * self._drawn[unit, number]
        share = 1.0 if self.schedule.recompute else 1 - self.costs.forward_of(stage)
        return share * self._drawn.pop((unit, number))

    def version(self, number: int, stage: int, replica: int, *, back: bool = False) -> int:
        """Version of the parameters of a replica's microbatch, counted from the job's first one."""
        version = self.schedule.back_version if back else self.schedule.version
        return version(self.layout.number(number, replica), stage, self.layout)

    def passed(
        self, task: str, stage: int, replica: int, number: int, *, back: bool, start_s: float, held: int
    ) -> None:
        step, microbatch = divmod(number, self.count)
        version = self.version(number, stage, replica, back=back)
        if not microbatch and not back:
            stale = step - version
            self._stale = [self._stale[0] + 1, self._stale[1] + stale, max(self._stale[2], stale)]
        report = PassReport(
            step=step,
            replica=replica,
            stage=stage,
            microbatch=microbatch,
            back=back,
            start_s=start_s,
            end_s=self.clock.now_s,
            version=version,
            held=held,
        )
        self.timeline.add(task, [report])

    def send(self, task: str, unit: Unit, number: int, *, back: bool) -> None:
        worker = self._homes[unit]
        if worker.task == task:
            worker.deliver(unit, number, back)
            return
        nbytes = self.costs.bytes_to(unit[0], back=back)
        self.parcel_bytes += nbytes
        self.stream(task, worker.task).send(nbytes, self._came, worker, unit, number, back)

    def _came(self, worker: VirtualStages, unit: Unit, number: int, back: bool) -> None:
        self.clock.after(self.costs.parcel_s, worker.deliver, unit, number, back)

    def stream(self, sender: str, receiver: str) -> MessageStream:
        if (sender, receiver) not in self._streams:
            machines = self.setup.machines
            self._streams[sender, receiver] = self._machines.stream(
                machines.get(sender, sender), machines.get(receiver, receiver)
            )
        return self._streams[sender, receiver]


def simulated(setup: Setup, contents: Contents | None = None) -> Result:
    """The result of a setup, with a pipeline or without. contents: of Simulation. Raises UsageError."""
    if not pipeline.of(setup.job).staged:
        return Simulation(setup, contents).run()
    return PipelineSimulation(setup).run()
