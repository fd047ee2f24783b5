"""Pipelines whose replicas don't wait for each other, under kills: see pipelines.

There is no undisturbed run to compare with, since the order of updates is the network's. What has to hold, for every
update in a checkpoint: it is one replica's gradient of one step, each replica's steps are there once and in order, and
the gradient is exactly that of the parameters with which each stage has computed that step, forward and backward.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

import shardline_pipeline as pipeline
from shardline import consistency
from shardline.client.layout import ModelLayout
from shardline.consistency.server import StepWanted
from shardline.consistency.worker import WorkerHalf
from shardline.core.image import WorkerSequence, origin
from shardline.core.outcome import Outcome
from shardline.core.records import Begin
from shardline.core.reduce import Block
from shardline_pipeline.by_stage import ByStage
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.record_log import RecordLog, copied_image
from shardline_ps.standby.standby import Standby
from tests.protocol_model.applied import check_cut, contribution, images
from tests.protocol_model.numbers import require
from tests.protocol_model.pipelines import PipelineModel
from tests.protocol_model.pipelines_chief import (
    Chain,
    PipelineSetup,
    Process,
    Values,
    backward,
    end,
    entered,
    forward,
    make_shards,
    tensor,
)

Bucket = tuple[int, int]
"""(shard, bucket)."""


@dataclass(frozen=True)
class Update:
    """An update of a bucket, as it was counted."""

    timeline: int
    replica: int
    step: int
    gradients: Values


@dataclass
class Memory:
    """What a process keeps between steps beside `Process`."""

    half: WorkerHalf
    ran: tuple[int, tuple[object, ...]] = (-1, ())
    """Timeline and posts of the passes that it has computed."""
    attempt: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class AsyncPipelineModel(PipelineModel):
    """A cluster that is played to its end, with a consistency by stage."""

    def __init__(self, setup: PipelineSetup) -> None:
        self.memories: dict[int, Memory] = {}
        """By incarnation."""
        self.used: dict[tuple[int, int, int, int, bool], torch.Tensor] = {}
        """Weights of each pass: by timeline, microbatch, replica, stage, and whether it is backward."""
        self.updates: dict[Bucket, list[Update]] = {}
        self.begun_at: dict[int, int] = {}
        """First version of each timeline."""
        super().__init__(setup)
        self.updates = {(shard.number, bucket.number): [] for shard in self.shards for bucket in shard.buckets}
        self.kept_updates = {place: list(made) for place, made in self.updates.items()}
        """Those of the last checkpoint."""
        self.furthest = 0
        """How many steps of any replica the last checkpoint has."""
        self.checked = self.held = self.failovers = 0
        self.standbys: dict[int, Standby] = {}
        if setup.standbys:
            for number in range(len(self.shards)):
                self.protect(number)
        mode = consistency.of(self.job.consistency)
        assert isinstance(mode, ByStage)
        self.slack = mode.slack
        self.order = random.Random(setup.seed)

    def kept(self, process: Process) -> Memory:
        mode = consistency.of(self.job.consistency)
        return self.memories.setdefault(process.who.incarnation, Memory(mode.worker_half(self.job)))

    # Workers

    def locate(self, process: Process) -> None:
        self.hear(process)
        process.begun = process.orders
        own = process.own(self.job)
        if not own or process.begun.timeline != self.timeline:
            return
        memory = self.kept(process)
        half = memory.half
        asked = pipeline.bound(self.job, process.begun.posts, own)
        if not self.answerable(range(len(self.shards))):
            return
        half.located({shard.number: self.standing(shard, asked) for shard in self.shards}, asked)
        anew = memory.ran != (process.begun.timeline, process.begun.posts)
        memory.ran = process.begun.timeline, process.begun.posts
        self.pull_all(process)
        self.counts.hosted += any(len(stages) > 1 for stages in own.values())
        if anew:
            process.first = half.step
            process.versions.clear()
            process.chains.clear()
        self.begin(process, half.step, own)

    def pull_all(self, process: Process) -> None:
        share = pipeline.share_of(self.job, self.plan, self.units_of(process))
        for number in share.shards:
            self.load(process, self.shards[number], share.buckets(number), -1)
        self.arrived(process, -1)

    def load(self, process: Process, shard: Shard, numbers: Sequence[int], step: int) -> bool:
        """Pull the newest parameters."""
        layout = ModelLayout(self.plan, process.pulled)
        for number in numbers:
            layout.load(shard.number, number, shard.buckets[number].values)
        return True

    def begin(self, process: Process, step: int, todo: Collection[int]) -> None:
        """The parameters of a replica's step are here, the newest there were: go on, where the runner is."""
        own = process.own(self.job)
        count = self.setup.microbatches
        process.step = step
        if step not in process.versions:
            process.versions[step] = {
                tensor(stage): process.model[tensor(stage)].clone() for held in own.values() for stage in held
            }
        rests = self.kept(process).half.job_step >= self.setup.steps
        process.to_push, process.to_pull, process.computing = [], [], not rests
        process.mailbox.begin(self.job, process.begun, step)
        if not process.chains:
            process.chains = {
                (stage, replica): Chain(stage, replica, forward=step * count, backward=step * count)
                for replica, held in own.items()
                for stage in held
            }

    def next(self, process: Process, chain: Chain, stop: int) -> list[tuple[int, bool]]:
        """In the schedule's order, like StreamRunner."""
        if not self.schedule.flushes:
            return super().next(process, chain, stop)
        count = self.setup.microbatches
        first = stop - count
        done = chain.forward + chain.backward - 2 * first
        if chain.backward >= stop:
            return []
        one = self.schedule.passes(chain.stage, self.setup.stages, count)[done]
        return [(first + one.microbatch, one.back)]

    def done(self, chain: Chain, stop: int) -> bool:
        return chain.backward >= stop

    def run(self, process: Process, chain: Chain, number: int, back: bool) -> None:
        key = process.begun.timeline, number, chain.replica, chain.stage, back
        self.used[key] = process.versions[self.version(process, chain, number, back=back)][tensor(chain.stage)]
        if self.schedule.flushes:
            chain.todo.append((number, back))
        super().run(process, chain, number, back)

    def end_step(self, process: Process) -> None:
        super().end_step(process)
        # Nothing needs older versions than the first pass of the next step.
        count = self.setup.microbatches
        oldest = min(
            self.schedule.version(
                self.layout.number((process.step + 1) * count, chain.replica),
                chain.stage,
                self.layout,
                first=process.first,
            )
            for chain in process.chains.values()
        )
        process.versions = {version: held for version, held in process.versions.items() if version >= oldest}

    def pull(self, process: Process) -> None:
        if process.begun.timeline != self.timeline:
            process.step = -1
            return
        share = pipeline.share_of(self.job, self.plan, self.units_of(process))
        number = self.random.choice(process.to_pull)
        shard, half = self.shards[number], self.kept(process).half
        numbers = share.buckets(number)
        own = process.own(self.job)
        for replica, bucket in [(r, b) for r in own for s, b in share.of(r) if s == number]:
            if shard.buckets[bucket].counted[replica] <= process.step:
                # Its push is not there yet, and the pull follows it.
                return
        if not self.answerable([number]):
            return
        ahead = StepWanted(step=process.step + 1, at_least=True)
        if any(shard.mode.serve(shard.buckets[bucket], ahead) is Outcome.WAITING for bucket in numbers):
            self.held += 1
            return
        self.load(process, shard, numbers, -1)
        process.to_pull.remove(number)
        if process.to_pull:
            return
        half.advance()
        half.closed(half.step, share.shards, {s: self.shards[s].version for s in share.shards}, dropped=False)
        self.arrived(process, -1)
        self.begin(process, process.step + 1, own)

    # Chief and servers

    def tell(self) -> None:
        """See shardline_chief.rules.views."""
        super().tell()
        if self.setup.withholds and self.assigned.moved:
            self.orders = replace(self.orders, posts=())

    def decide(self) -> None:
        """A checkpoint may be written before the chief sees to what has moved."""
        if self.random.random() < 0.3:
            super().decide()

    def counted(self, shard: int, bucket: int, replica: int, step: int, gradients: Values) -> None:
        steps = self.shards[shard].buckets[bucket].counted
        lead = steps[replica] - min(steps)
        require(self.slack < 0 or lead <= self.slack + 1, f"replica {replica} is {lead} steps ahead")
        made = {name: values.clone() for name, values in gradients.items()}
        self.updates[shard, bucket].append(Update(self.timeline, replica, step, made))

    def act(self) -> None:
        if self.standbys and self.random.random() < 0.3:
            self.replicate(self.random.randrange(len(self.shards)))
        else:
            super().act()

    # Standbys

    def protect(self, number: int) -> None:
        """Begin to copy a shard to a standby."""
        shard, log = self.shards[number], RecordLog(on_entry=lambda: None, run=lambda release: release())
        shard.storage.log = log
        fresh = make_shards(self.setup, self.plan, aggregates=False, consistency=self.setup.consistency)[number]
        self.standbys[number] = standby = Standby(fresh)
        standby.take(Begin(1))
        log.restart(1)
        for bucket in shard.buckets:
            log.image(1, bucket.number, copied_image(bucket))
        pushes, verdict = shard.mode.remembered()
        log.mark(1, pushes=pushes, verdict=verdict)

    def replicate(self, number: int) -> None:
        """The next record arrives at a standby, or its acknowledgement at the primary."""
        log, standby = self.shards[number].storage.log, self.standbys[number]
        assert log is not None
        entry = log.take()
        if entry is not None:
            standby.take(entry.frame)
        elif self.random.random() < 0.5:
            log.acknowledge(1, standby.record)

    def answerable(self, numbers: Iterable[int]) -> bool:
        """Whether these standbys have what an answer would tell."""
        logs = [self.shards[number].storage.log for number in numbers]
        return all(log is None or log.acked >= log.sent for log in logs)

    def lose_server(self) -> None:
        """See PipelineModel. What its standby lacks, nobody has seen."""
        number = self.random.randrange(len(self.shards))
        standby = self.standbys.get(number)
        if standby is None or not standby.synced:
            super().lose_server()
            return
        self.failovers += 1
        require(not standby.promote(0), "a standby that is whole is not promoted")
        self.shards[number] = shard = standby.shard
        for bucket in shard.buckets:
            del self.updates[number, bucket.number][bucket.step :]
        self.timeline += 1
        for each in self.shards:
            each.mode.members_changed(())
        self.protect(number)
        self.bound()
        self.tell()

    def roll_back(self) -> None:
        self.counts.rollbacks += 1
        self.timeline += 1
        _, cut = self.committed
        for shard in self.shards:
            # See shardline_chief.io.checkpointer.restore.
            steps = {origin(replica): WorkerSequence(0, self.furthest) for replica in range(self.setup.replicas)}
            shard.restore(cut[shard.number], steps)
        self.updates = {place: list(made) for place, made in self.kept_updates.items()}
        for number in self.standbys:
            self.protect(number)
        self.assigned.moved.clear()
        self.assigned.unready.clear()
        self.bound()
        self.tell()

    def commit(self) -> None:
        for step in range(self.setup.steps, self.committed[0], -1):
            held = {shard.number: shard.cuts.whole(step) for shard in self.shards}
            if any(found is None for found in held.values()):
                continue
            cut = {number: found.in_order() for number, found in held.items() if found is not None}
            sequences = [found.sequences.values() for found in held.values() if found is not None]
            self.furthest = max(one.last_seq for own in sequences for one in own)
            self.kept_updates = {place: list(made[:step]) for place, made in self.updates.items()}
            self.check(step)
            replayed = make_shards(self.setup, self.plan, aggregates=False, consistency=self.setup.consistency)
            for (shard, bucket), made in self.updates.items():
                counted = dict.fromkeys(range(self.setup.replicas), 0)
                for one in made[:step]:
                    given = contribution(self.plan, shard, bucket, dict(one.gradients))
                    replayed[shard].contribute(bucket, counted[one.replica], Block(one.replica, 1), given)
                    counted[one.replica] += 1
            check_cut(cut, images(replayed))
            self.committed = step, cut
            self.chief.saves.checkpoint_step = step
            for shard in self.shards:
                shard.cuts.release(step)
            return

    def check(self, step: int) -> None:
        """All updates in a cut of so many."""
        for (shard, bucket), made in self.updates.items():
            last: dict[int, int] = {}
            stage = self.plan.tensors[self.shards[shard].buckets[bucket].spec.slices[0].tensor].fragment
            for one in made[:step]:
                where = f"bucket {bucket} of shard {shard}, step {one.step} of replica {one.replica}"
                require(one.step > last.get(one.replica, -1), f"{where} is counted again in the cut of step {step}")
                last[one.replica] = one.step
                right = self.gradient(one, stage)
                name = tensor(stage)
                require(torch.equal(one.gradients[name], right), f"{where} has another gradient in the cut of {step}")
                self.checked += 1

    def gradient(self, one: Update, stage: int) -> torch.Tensor:
        """The gradient of a stage by the weights that the stages say to have used."""
        total, stages, count = torch.zeros(2), range(self.setup.stages), self.setup.microbatches
        for microbatch in range(count):
            number = one.step * count + microbatch
            used = [self.used[one.timeline, number, one.replica, at, False] for at in stages]
            given = [entered(one.step, one.replica, microbatch)]
            for weight in used:
                given.append(forward(weight, given[-1]))
            if self.schedule.recompute:
                last = stages[-1]
                given[-1] = forward(self.used[one.timeline, number, one.replica, last, True], given[last])
            come = end(given[-1])
            # Earlier stages may not have gone back yet.
            for at in reversed(stages[stage:]):
                back = self.used[one.timeline, number, one.replica, at, True]
                stashed = self.setup.pipeline in ("ftpipe", "no-stash") or torch.equal(used[at], back)
                require(stashed, f"stage {at} has gone back with other weights")
                gradient, come = backward(back, given[at], come)
            total = total + gradient
        return total
