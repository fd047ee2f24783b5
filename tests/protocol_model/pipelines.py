"""Pipelines under kills: what workers do, and in which order everything happens; see pipelines_chief."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

import shardline_pipeline as pipeline
from shardline import consistency
from shardline.cadence import Outgoing, Told
from shardline.client.applied.worker_optimizer import ServerStates
from shardline.client.exchange.shard_exchange import Restart
from shardline.client.layout import ModelLayout
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.parcel import Parcel, ParcelKey
from shardline.core.reduce import Block
from shardline.errors import ShardlineError, UnreachableError
from shardline.waist import Sender, Standing
from shardline_pipeline.schedules.asynchronous import AsynchronousSchedule
from shardline_ps.shard.shard import Shard
from tests.protocol_model.applied import contribution
from tests.protocol_model.numbers import require
from tests.protocol_model.pipelines_chief import (
    Chain,
    Message,
    PipelineChief,
    PipelineCounts,
    Process,
    Values,
    backward,
    end,
    entered,
    forward,
    tensor,
)

LIMIT = 40_000
"""Actions after which a schedule counts as stuck; most take a few thousand."""


class Stopped(Exception):
    """The process is told that it is fenced."""


class PipelineModel(PipelineChief):
    """A cluster that is played to its end."""

    # The scheduler

    def play(self) -> PipelineCounts:
        for _ in range(LIMIT):
            if self.committed[0] == self.setup.steps:
                return self.counts
            self.act()
        steps = [bucket.step for shard in self.shards for bucket in shard.buckets]
        raise AssertionError(f"stuck at cut {self.committed[0]}, steps {steps}")

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.004 and self.kills:
            self.kill()
        elif dice < 0.005 and self.losses:
            self.losses -= 1
            self.lose_server()
        elif dice < 0.006 and self.chiefs:
            self.chiefs -= 1
            self.counts.chiefs += 1
            self.take_office()
            self.assign()
        elif dice < 0.03:
            self.notice()
        elif dice < 0.04:
            self.start()
        elif dice < 0.08:
            self.decide()
            self.commit()
        elif dice < 0.3 and self.net:
            self.deliver()
        elif dice < 0.32 and self.pushes:
            self.arrive(*self.random.choice(self.pushes))
        elif self.processes:
            process = self.random.choice(self.processes)
            try:
                self.work(process)
            except Stopped:
                self.processes.remove(process)
            except Restart:
                process.step = -1

    def lose_server(self) -> None:
        """A server is lost, and what it held."""
        self.roll_back()

    # Parcels

    def send(self, process: Process, key: ParcelKey, values: torch.Tensor) -> None:
        stage = key.stage
        post = process.begun.posts[pipeline.unit_of(self.job, stage, key.replica)]
        marked = f"{process.begun.timeline}".encode()
        parcel = Parcel(key, (values,), random_state=marked)
        self.net.append(Message(process.who, post.incarnation, process.begun.timeline, process.begun.posting, parcel))

    def deliver(self) -> None:
        """A parcel arrives, any of those under way; what can't be taken yet is sent again, for a while."""
        number = self.random.randrange(len(self.net))
        message = self.net[number]
        if self.random.random() < 0.9:
            self.net[number] = self.net[-1]
            self.net.pop()
        receiver = next((one for one in self.processes if one.who.incarnation == message.to), None)
        if receiver is None:
            self.again(message)
            return
        box = receiver.mailbox
        timeline = message.timeline if self.setup.fences else receiver.begun.timeline
        header = SimpleNamespace(
            job=self.job.name,
            timeline=timeline,
            posting=message.posting if self.setup.waits else 0,
            key=message.parcel.key,
            codecs=frozenset[str](),
        )
        try:
            box.check_sender(message.who)
            if not box.awaits(cast(Any, header), wait_s=0.0):
                self.counts.late += 1
                return
        except UnreachableError:
            self.again(message)
            return
        except ShardlineError:
            self.counts.late += 1
            return
        box.deliver(message.who, timeline, message.parcel)

    def again(self, message: Message) -> None:
        """Its sender repeats it until its orders change."""
        senders = [one for one in self.processes if one.who == message.who]
        by = (message.timeline, message.posting)
        if senders and (senders[0].begun.timeline, senders[0].begun.posting) == by:
            if message not in self.net:
                self.net.append(message)
        elif self.random.random() < 0.2 and message not in self.net:
            # It may be in the network still.
            self.net.append(message)

    def take(self, process: Process, key: ParcelKey) -> torch.Tensor:
        parcel = process.mailbox.take(key)
        told = int(parcel.random_state)
        require(told == process.begun.timeline, f"{key} of timeline {told} is used in {process.begun.timeline}")
        return parcel.values[0]

    # Workers

    def work(self, process: Process) -> None:
        """One action of one worker."""
        if self.random.random() < 0.1:
            self.hear(process)
        if process.step < 0:
            self.locate(process)
        elif process.computing:
            self.compute(process)
        elif process.to_push:
            place = process.to_push.pop(self.random.randrange(len(process.to_push)))
            replica, shard = place
            push = process, process.begun.timeline, process.step, replica, shard, process.gradients[replica]
            self.pushes.append(push)
            if self.random.random() < 0.9:
                self.arrive(*push)
            else:
                # It is lost, and pushed again.
                process.to_push.append(place)
        elif process.to_pull:
            self.pull(process)
        elif process.local is not None and process.begun.timeline == self.timeline:
            wanting = [one.number for one in self.shards if one.summing is not None and one.summing.wants_state()]
            process.local.bring_last(process.step, wanting)

    def hear(self, process: Process) -> None:
        if process not in self.members.values():
            raise Stopped
        if process.orders != self.orders:
            process.orders = self.orders
        before, now = process.begun, process.orders
        changed = before.work != now.work
        if not self.setup.starts_over:
            task = process.who.task
            changed = list(before.units(task)) != list(now.units(task))
        if changed or before.timeline != now.timeline:
            process.step = -1

    def arrive(self, process: Process, timeline: int, step: int, replica: int, shard: int, gradients: Values) -> None:
        """A push arrives at a shard, maybe not for the first time."""
        if timeline != self.timeline or self.members.get(process.who.task) is not process:
            return
        for bucket in self.shards[shard].buckets:
            name = tensor(self.plan.tensors[bucket.spec.slices[0].tensor].fragment)
            if name not in gradients:
                continue
            given = contribution(self.plan, shard, bucket.number, {n: v for n, v in gradients.items() if v.numel()})
            decision = self.shards[shard].contribute(bucket.number, step, Block(replica, 1), given)
            require(decision.outcome is not Outcome.REFUSED, decision.reason)
            self.counts.duplicates += decision.outcome is Outcome.DUPLICATE
            if decision.outcome is Outcome.COUNTED:
                self.counted(shard, bucket.number, replica, step, gradients)

    def counted(self, shard: int, bucket: int, replica: int, step: int, gradients: Values) -> None:
        """A contribution has counted."""

    def units_of(self, process: Process) -> Sequence[int]:
        return process.begun.units(process.who.task)

    def standing(self, shard: Shard, replicas: Iterable[int]) -> Standing:
        return Standing(
            outcome=Outcome.SERVED,
            reason="",
            timeline=self.timeline,
            replicas={replica: shard.mode.progress(replica) for replica in replicas},
            step_max=shard.step_max,
            version=shard.version,
            last_seq=shard.mode.last_push(""),
        )

    def locate(self, process: Process) -> None:
        """PROTOCOL 1.4.1."""
        self.hear(process)
        process.begun = process.orders
        own = process.own(self.job)
        if not own or process.begun.timeline != self.timeline:
            return
        half = consistency.of(self.job.consistency).worker_half(self.job)
        asked = list(range(self.job.replicas)) if self.setup.alike else list(own)
        todo = half.located({shard.number: self.standing(shard, asked) for shard in self.shards}, asked)
        step = half.step
        share = pipeline.share_of(self.job, self.plan, self.units_of(process))
        if process.local is not None:
            self.meet(process, share)
        process.wanting.clear()
        for shard in share.shards:
            if not self.load(process, self.shards[shard], share.buckets(shard), step):
                return
        if not self.arrived(process, step, located=True):
            return
        process.first = step
        process.versions.clear()
        self.counts.hosted += any(len(stages) > 1 for stages in own.values())
        self.begin(process, step, own if self.setup.alike else todo)

    def meet(self, process: Process, share: pipeline.Share) -> None:
        assert process.local is not None
        if process.met != self.timeline:
            timeline = process.met = self.timeline

            def sender() -> Sender:
                return Sender(job=self.job.name, timeline=timeline, plan_id=self.plan.plan_id, who=process.who)

            process.local.meet(
                self.plan,
                ModelLayout(self.plan, process.model),
                ModelLayout(self.plan, process.pulled),
                ServerStates(Servers(self), sender),
            )
        process.local.own(share)

    def load(self, process: Process, shard: Shard, numbers: Sequence[int], step: int) -> bool:
        """Pull the parameters of a step; False if they are gone, or not there yet."""
        buckets = [shard.buckets[number] for number in numbers]
        if not all(bucket.step in (step, step + 1) and bucket.oldest <= step for bucket in buckets):
            return False
        layout = ModelLayout(self.plan, process.pulled)
        for bucket in buckets:
            layout.load(shard.number, bucket.number, bucket.values_at(step))
        if shard.summing is not None and shard.summing.wants_state(numbers):
            process.wanting.append(shard.number)
        return True

    def arrived(self, process: Process, step: int, *, located: bool = False) -> bool:
        if process.local is None:
            for name, values in process.pulled.items():
                process.model[name].copy_(values)
            return True
        process.local.began(step)
        try:
            process.local.arrived(step, Told(located=located, wants_state=list(process.wanting)))
        except Restart:
            return False
        return True

    def begin(self, process: Process, step: int, todo: Collection[int]) -> None:
        """The parameters of a step are here: compute these replicas' part of it."""
        own = process.own(self.job)
        stages = {stage for held in own.values() for stage in held}
        right = self.alone.weights[min(step, self.setup.steps)]
        if process.begun.timeline == self.timeline and not self.unsettled:
            for stage in stages:
                name = tensor(stage)
                where = f"{process.who.task} has another {name} at step {step}"
                require(torch.equal(process.model[name], right[name]), where)
        process.step, process.all_began = step, False
        if isinstance(self.schedule, AsynchronousSchedule) and self.schedule.keeps_one:
            process.versions.clear()
        process.versions[step] = {tensor(stage): process.model[tensor(stage)].clone() for stage in stages}
        process.to_push, process.to_pull, process.computing = [], [], step < self.setup.steps
        process.mailbox.begin(self.job, process.begun, step)
        count = self.setup.microbatches
        if self.schedule.flushes or step == process.first:
            # Without a flush nothing is counted where a history begins, and what is under way stays so later.
            process.chains = {
                (stage, replica): Chain(stage, replica, forward=step * count, backward=step * count)
                for replica, held in own.items()
                if replica in todo or not self.schedule.flushes
                for stage in held
            }
        for chain in process.chains.values() if self.schedule.flushes else ():
            passes = self.schedule.passes(chain.stage, self.setup.stages, count)
            chain.todo = deque((step * count + one.microbatch, one.back) for one in passes)

    @property
    def unsettled(self) -> bool:
        """Whether the chief has yet to decide that the job goes back."""
        return bool(self.assigned.moved or self.assigned.unready)

    def compute(self, process: Process) -> None:
        """One pass that has what it needs; when all are done, there is something to push."""
        stop = (process.step + 1) * self.setup.microbatches
        ready = [
            (chain, number, back)
            for chain in process.chains.values()
            for number, back in self.next(process, chain, stop)
            if self.ready(process, chain, number, back=back)
        ]
        if not ready and process.all_began and process.local is not None:
            self.counts.rested += 1
            process.local.rest()
        if ready:
            self.counts.passes += 1
            self.run(process, *self.random.choice(ready))
        elif self.setup.looks and self.schedule.flushes and self.random.random() < 0.05:
            waiting = sorted(chain.replica for chain in process.chains.values() if chain.todo)
            if waiting and self.closed(process, range(self.job.replicas) if self.setup.alike else waiting[:1]):
                self.counts.looked += 1
                process.step = -1
                return
        if all(self.done(chain, stop) for chain in process.chains.values()):
            self.end_step(process)

    def closed(self, process: Process, replicas: Iterable[int]) -> bool:
        """Whether all stages have counted what these replicas bring to this step."""
        found = min(shard.mode.progress(replica) for shard in self.shards for replica in replicas)
        return process.begun.timeline == self.timeline and found > process.step

    def next(self, process: Process, chain: Chain, stop: int) -> list[tuple[int, bool]]:
        if not isinstance(self.schedule, AsynchronousSchedule):
            return [chain.todo[0]] if chain.todo else []
        own = self.layout.crew(chain.replica, chain.stage)
        crew = [
            one
            for one in process.chains.values()
            if one.stage == chain.stage and self.layout.crew(one.replica, one.stage) == own
        ]
        place, steps = {"step": process.step, "first": process.first}, self.setup.steps
        follows = set(self.schedule.follows(chain, crew, chain.stage, self.layout, steps=steps, **place))
        if not self.setup.ends and chain.backward == stop - 1 and chain.backward < chain.forward:
            follows.add(True)
        return [(chain.backward if back else chain.forward, back) for back in sorted(follows)]

    def done(self, chain: Chain, stop: int) -> bool:
        return not chain.todo if self.schedule.flushes else chain.backward >= stop

    def place(self, chain: Chain, number: int, *, stage: int, back: bool) -> ParcelKey:
        count = self.setup.microbatches
        return ParcelKey(number // count, chain.replica, stage, number % count, back)

    def ready(self, process: Process, chain: Chain, number: int, *, back: bool) -> bool:
        if self.version(process, chain, number, back=back) not in process.versions:
            return False
        if chain.stage == (self.setup.stages - 1 if back else 0):
            return True
        return process.mailbox.here(self.place(chain, number, stage=chain.stage, back=back))

    def version(self, process: Process, chain: Chain, number: int, *, back: bool) -> int:
        version = self.schedule.back_version if back else self.schedule.version
        return version(self.layout.number(number, chain.replica), chain.stage, self.layout, first=process.first)

    def run(self, process: Process, chain: Chain, number: int, back: bool) -> None:
        key, last = self.place(chain, number, stage=chain.stage, back=back), self.setup.stages - 1
        weight = process.versions[self.version(process, chain, number, back=back)][tensor(chain.stage)]
        if not back:
            given = self.take(process, key) if chain.stage else entered(key.step, key.replica, key.microbatch)
            output = forward(weight, given)
            chain.given[number] = given, output
            chain.forward += 1
            if chain.stage < last:
                self.send(process, self.place(chain, number, stage=chain.stage + 1, back=False), output)
        else:
            given, output = chain.given.pop(number)
            if self.schedule.recompute:
                output = forward(weight, given)
            come = self.take(process, key) if chain.stage < last else end(output)
            gradient, returned = backward(weight, given, come)
            chain.gradient = chain.gradient + gradient
            chain.backward += 1
            if chain.stage:
                self.send(process, self.place(chain, number, stage=chain.stage - 1, back=True), returned)
        process.all_began = process.all_began or back or chain.stage == last
        if self.schedule.flushes:
            chain.todo.popleft()

    def end_step(self, process: Process) -> None:
        process.computing, process.gradients = False, {}
        share = pipeline.share_of(self.job, self.plan, self.units_of(process))
        for replica, stages in process.own(self.job).items():
            if (stages[0], replica) not in process.chains:
                continue
            made = {tensor(stage): process.chains[stage, replica].gradient for stage in stages}
            if process.local is not None:
                process.local.enter(replica, 0)
                sent = process.local.take(replica, 0, Outgoing(values=made)).values
                made = {name: sent.get(name, torch.zeros(0)) for name in made}
            process.gradients[replica] = made
            process.to_push += [(replica, shard) for shard in {shard for shard, _ in share.of(replica)}]
        process.to_pull = list(share.shards)
        process.wanting.clear()
        for chain in process.chains.values():
            chain.gradient = torch.zeros(2)

    def pull(self, process: Process) -> None:
        if process.begun.timeline != self.timeline:
            process.step = -1
            return
        share = pipeline.share_of(self.job, self.plan, self.units_of(process))
        number, step = self.random.choice(process.to_pull), process.step + 1
        shard = self.shards[number]
        numbers = share.buckets(number)
        if min(shard.buckets[one].step for one in numbers) < step:
            return
        if not self.load(process, shard, numbers, step):
            process.step = -1
            return
        process.to_pull.remove(number)
        if not process.to_pull:
            if self.arrived(process, step):
                self.begin(process, step, process.own(self.job))
            else:
                process.step = -1


class Servers:
    """What workers ask shards for, where these have the optimizer's state for a cut only: see Exchanges."""

    def __init__(self, model: PipelineModel) -> None:
        self._model = model

    def state(self, sender: Sender, shard: int, step: int, buckets: Sequence[int] = ()) -> Sequence[BucketImage] | None:
        """See Exchanges."""
        if sender.timeline != self._model.timeline:
            raise Restart
        summing = self._model.shards[shard].summing
        assert summing is not None
        return summing.state(step, buckets)

    def bring_state(self, sender: Sender, shard: int, images: Sequence[BucketImage]) -> Outcome:
        """See Exchanges."""
        if sender.timeline != self._model.timeline:
            return Outcome.WRONG_TIMELINE
        summing = self._model.shards[shard].summing
        assert summing is not None
        return summing.bring(images).outcome
