"""A worker's step on one page: forward, backward, exchange, step. PROTOCOL 1.4 and 1.5.

    begin(replica)           before a forward pass: the model has what this replica computes with
    expect(replica, ...)     before its last backward pass: gradients leave while they are computed, if they may
    contribute(replica, g)   after it: the cadence (`local`) makes of g what is sent, the topology (`route`) says whose
                             part it is, staging copies it into buckets and sums replicas
    finish()                 one push per shard, the pull of the next parameters behind it, then the next step
    send(), settle()         finish() in two parts, between which the next forward pass may begin

Decision 0047 says why it has these parts and no more wrappers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from shardline import cadence as cadences, codecs, consistency, division
from shardline.cadence import Held, Outgoing, Sends, Ticks, Told
from shardline.client.applied.worker_optimizer import WorkerOptimizer
from shardline.client.exchange.shard_exchange import (
    Exchange,
    PullSink,
    Restart,
    Running,
    ShardOutcome,
    ShardTask,
    StepFigures,
)
from shardline.client.exchange.streaming_payloads import LivePayloads, ReadyPayloads, bucket_ranks
from shardline.client.step.early_push import AsComputed, Expected
from shardline.client.step.staging import NonFinite, PushTools, filled_payloads, initial_contribution, loss_names
from shardline.client.step.weights import Weights
from shardline.client.watch.model_watch import UNWATCHED
from shardline.codecs.coding import Coding, PushEncoders
from shardline.consistency.worker import ComputedAt, Stamp, WorkerHalf
from shardline.core.orders import JobView
from shardline.core.outcome import Outcome
from shardline.core.placement import Post
from shardline.core.plan import Plan
from shardline.core.reduce import Block
from shardline.core.settings import EXACT, WORKER
from shardline.core.spec import JobSpec, TensorKind
from shardline.division import Share
from shardline.errors import ProtocolError, UnreachableError
from shardline.update.torch_optim.inner import InnerOptimizers
from shardline.waist import Payloads, Push, Sender, Standing, Want, Whole

PATIENCE = 5.0
"""A call waits for gradients this many times as long as the longest computation so far."""
LONGEST_WAIT_S = 600.0
"""Seconds that a server holds a pull at most."""


class Trainer:
    """Gradients in, parameters out, for one worker and all shards. Used by one thread.

    methods: outlives the trainer. early: sends gradients during the backward pass; None = all leave when the step ends.
    Pulls write the tensors of `weights`. See make_trainer().
    """

    def __init__(
        self,
        view: JobView,
        sender: Sender,
        methods: WorkerMethods,
        weights: Weights,
        tools: PushTools,
        exchange: Exchange,
        early: AsComputed | None,
    ) -> None:
        self.job = view.job
        self.plan = view.plan
        self.methods = methods
        self.half = methods.half
        self.weights = weights
        self.exchange = exchange
        self.meter = PushTraffic(weights.sinks)
        self.sender = sender
        self._staging = tools.staging
        self.encoders = tools.staging.encoders
        self._early = early
        self._nonfinite = NonFinite(view.job.consistency.nan_policy, tools.staging, exchange.observer)
        self.open = OpenStep(methods, tools, early)
        self._start_s = self._computed_s = self._began_s = 0.0
        self._longest_s = 0.0
        """Longest computation of a step so far, in seconds."""
        self.watch = UNWATCHED
        """Looks at what the user's code does to the model."""

    @property
    def step(self) -> int:
        return self.half.step

    # Forward

    def begin(self, replica: int = 0) -> None:
        """Prepare the model for a replica's forward pass; call before each."""
        self._began_s = time.monotonic()
        self.watch.put_back()
        self.weights.enter_pass(pending=self.open.sent, running=self.open.running)
        self.methods.local.enter(replica, self.methods.ticks.tick)

    def wait_for(self, tensors: Iterable[int]) -> None:
        """Wait until these tensors (numbers in the plan) contain the values of `step`.

        Raises the error that ended the exchange if they did not arrive; settle() raises it again.
        """
        self.weights.wait_for(tensors, self.open.running)

    # Backward

    def expect(self, expected: Expected) -> None:
        """Call right before a replica's last backward pass: its gradients leave as they are computed, if possible.

        Otherwise contribute() and finish() send them. No exchange may be pending. Raises NonFiniteError like
        contribute(), JobError like check_stepped().
        """
        self.check_stepped()
        self.disarm()
        if not _look(self) and self._early is not None:
            self._early.expect(expected, first=self.open.first, begin=self.begin_early)

    def check_stepped(self) -> None:
        """Raise JobError, after giving it up, if a backward pass sent gradients and no step followed."""
        if self._early is not None and self._early.begun and not self.open.sent:
            error = self._early.not_stepped(self.step)
            self.give_up()
            raise error

    def disarm(self) -> None:
        """Stop expecting a backward pass; a push that has begun is not affected."""
        if self._early is not None and not (self.open.sent or self._early.begun):
            self._early.end_step()

    def begin_early(self, block: Block, payloads: Mapping[int, Payloads]) -> None:
        """Start the exchange when the first bucket is ready. Called by a hook during the backward pass."""
        self.open.push_early(block, payloads)
        self._start(hold=True, compute_s=self._longest_s)

    def contribute(
        self,
        replica: int,
        gradients: Mapping[str, torch.Tensor],
        *,
        samples: int = 0,
        loss: float | None = None,
        hyper: Mapping[int, Mapping[str, float]] | None = None,
        keep: bool = False,
    ) -> Mapping[int, Outgoing]:
        """Add one replica's gradients (by tensor name; absent = None in torch) to the open tick.

        keep: the tensors do not change until the step is closed, so they need not be copied.
        Returns what the cadence sends, by replica; {} if nothing is sent yet.
        Raises NonFiniteError naming loss or tensor under the policy "stop"; nothing has left this worker then, except
        buckets that left during the backward pass. Raises JobError if gradients changed after they had left.
        """
        self._longest_s = max(self._longest_s, time.monotonic() - self._began_s if self._began_s else 0.0)
        if _look(self):
            _judge(self)
        ticks = self.methods.ticks
        buffers = self.weights.changed_buffers() if ticks.last and self.half.brings_buffers(replica) else {}
        made = self.methods.local.take(
            replica,
            ticks.tick,
            Outgoing(values=gradients, buffers=buffers, samples=samples, hyper=hyper or {}, loss=loss, keep=keep),
        )
        if not ticks.last:
            self._nonfinite.judge(self.step, replica, loss_names(loss))
            return {}
        self.hand_over(replica, made)
        return {replica: made}

    def hand_over(self, replica: int, outgoing: Outgoing) -> None:
        """Add a replica's part of the open step, as made by the cadence. Raises like contribute()."""
        values = {
            **_numbered(self.plan, outgoing.values, TensorKind.PARAM),
            **_numbered(self.plan, outgoing.values, TensorKind.TABLE),
        }
        buffers = _numbered(self.plan, outgoing.buffers, TensorKind.BUFFER) if outgoing.buffers else {}
        bad = [*loss_names(outgoing.loss), *outgoing.nonfinite]
        if self._early is not None and self._early.armed:
            self._nonfinite.judge(self.step, replica, bad, early=True)
            self._early.close(values, buffers, outgoing.hyper)
            return
        self._staging.extras.samples[replica] = outgoing.samples
        if outgoing.hyper and self.half.brings_buffers(replica):
            self._staging.extras.hyper = outgoing.hyper
        slot, keys, keep = self.half.slot(replica), self.open.share.of(replica), outgoing.keep
        bad += self._staging.add(slot, values, buffers, presum=self.open.presums, keep=keep, keys=keys)
        self._nonfinite.judge(self.half.step, replica, bad)

    # Exchange and step

    def finish(self) -> StepFigures:
        """Send the contributions and get the next parameters. Raises Restart, Stopped or Interrupted."""
        self._send(here=True)
        figures = self._complete()
        self.watch.arrived()
        return figures

    def send(self) -> None:
        """finish() without waiting: wait_for() and settle() wait for the parameters of the next `step`."""
        self._send()
        self.watch.sent()
        self.open.sent = True
        self.methods.sent()

    def settle(self) -> StepFigures | None:
        """Wait for the exchange after send(); None if there is none. Raises the same errors as finish()."""
        return self._complete() if self.open.sent else None

    def _send(self, *, here: bool = False) -> None:
        self._computed_s = time.monotonic()
        if not self.open.pushes:
            self.open.make_pushes()
        self.weights.restore()
        if self.open.running is None:
            self._start(hold=False, here=here)
        self.weights.release()

    def _start(self, *, hold: bool, compute_s: float = 0.0, here: bool = False) -> None:
        """Start the exchange of the open step. compute_s: seconds that gradients may still take. here: see start()."""
        timeouts, early, weights = self.exchange.timeouts, self._early, self.weights
        patience_s = timeouts.rpc_s + PATIENCE * compute_s if hold else 0.0
        tasks = {}
        for shard, pushes in self.open.pushes.items():
            for push in pushes:
                if isinstance(push.payloads, LivePayloads):
                    push.payloads.be_patient(patience_s or timeouts.rpc_s)
            want = Want(
                step=self.open.target,
                ahead=self.half.ahead,
                have_step=weights.sinks[shard].base_step if self.open.target is None else weights.have,
                buckets=early.pull_order(shard, hold=hold) if early is not None else self.open.share.buckets(shard),
                wait_s=min(LONGEST_WAIT_S, timeouts.server_wait_s + compute_s),
            )
            tasks[shard] = self.open.task(shard, want, patience_s=patience_s)
        self._start_s = time.monotonic()
        weights.begin_pull(hold=hold)
        self.open.running = self.exchange.start(self.sender, tasks, weights.arrivals.end, weights.pulling, here=here)

    def _complete(self) -> StepFigures:
        """Wait for the exchange and close the step. After a failed exchange, start it again with the same pushes."""
        if self.open.running is None:
            self._start(hold=False, here=True)
        running = self.open.running
        assert running is not None
        try:
            outcomes = running.wait()
            self.weights.await_all(running)
        finally:
            self.open.running = None
        for shard, pushes in self.open.pushes.items():
            self.meter.pushed(shard, pushes, on_wire=not self.exchange.lanes[shard].by_reference)
        if self._early is not None:
            self._early.learn()
        dropped = any(push.skip for pushes in self.open.pushes.values() for push in pushes)
        self.methods.versions = base = self.weights.settle(self.open.target)
        skipped = self.half.closed(self.half.step + (not self.open.sent), outcomes, base, dropped=dropped)
        self.open.close()
        self.open.first = False
        self.encoders.settle(skipped=skipped)
        self.methods.next_step(outcomes)
        seconds, gap = running.ended_s - self._start_s, self.weights.gap.last
        return StepFigures(seconds=seconds, computed_s=self._computed_s, outcomes=outcomes, skipped=skipped, gap=gap)

    # Starting, and starting over

    def initialize(self) -> None:
        """Send the model's values as the job's initial ones (Orders.init)."""
        plain, layout = self.weights.coding.plain, self.weights.layout
        pushes = {shard: initial_contribution(plain, shard, layout) for shard in range(len(self.plan.shards))}
        tasks = {s: ShardTask(shard=s, contributions=[push], want=None) for s, push in pushes.items()}
        self.exchange.start(self.sender, tasks).wait()

    def locate(self, units: Iterable[int], timeline: int, posts: Sequence[Post] = ()) -> set[int]:
        """Find the step to work on and pull its parameters; returns the replicas that have to contribute to it.

        units: replicas, or in a pipeline stages of replicas. There all workers compute the step that some replica
        lacks, for each replica that they have: who left out one that has counted would send no parcels of it to a
        worker that had asked before it counted. No exchange may be running: see give_up().
        """
        self.sender = replace(self.sender, timeline=timeline)
        self.weights.forget()
        self.open.close()
        self.open.first = True
        share = self.open.share = self.methods.parts.share(self.plan, units)
        if self.methods.applied is not None:
            self.methods.applied.own(share)
        self.weights.arrivals.keys = tuple(share.keys)
        asked = self.methods.parts.together(posts, share, all_do=self.half.steps_with_all)
        standings = self.standings(self.half.asks_for(asked))
        todo = self.half.located(standings, asked)
        before = self.methods.versions
        outcomes = _fetch(self)
        # Only now: a step that counts may have been open when the shards were asked.
        skipped = bool(before) and all(self.methods.versions[n] == before.get(n) for n in standings)
        self.encoders.locate(self.half.awaited(standings, share.replicas), skipped=skipped)
        self.half.arrived(self.methods.versions)
        self.open.close()
        self.methods.restart(outcomes)
        self.watch.arrived()
        return set(share.replicas) if share.partial else todo

    def standings(self, replicas: Sequence[int]) -> dict[int, Standing]:
        """Each shard's standing on these replicas. Raises Restart, Interrupted, UnreachableError."""
        found = {}
        for shard in sorted(self.exchange.lanes):
            standing = found[shard] = self.exchange.standing(self.sender, shard, replicas)
            if standing.outcome is not Outcome.SERVED:
                raise Restart(f"shard {shard}: {standing.outcome.name.lower()}: {standing.reason}")
        return found

    def give_up(self) -> None:
        """End the running exchange; what has arrived is of no use. arm() the exchange before the next one.

        Raises UnreachableError if it doesn't end.
        """
        if self.open.running is not None:
            self.weights.arrivals.end()
            self.exchange.give_up()
        self.weights.untouched()
        self.open.close()

    def close(self) -> None:
        """End threads and calls, free the lanes, remove the hooks from the model."""
        if self._early is not None:
            self._early.detach()
        self.weights.arrivals.end()
        self.exchange.close()
        self.weights.keep()
        with contextlib.suppress(UnreachableError):
            self.open.close()
        self._staging.close()

    def gradient_view(self, name: str) -> torch.Tensor | None:
        """Memory that the shard reads, to compute this tensor's gradient in; None if there is none (left)."""
        # It contains the unsent gradients of another replica of this worker.
        if self._staging.has_gradients or self.weights.memory is None:
            return None
        return self.weights.memory.gradient(self.plan.index[name])


def _look(trainer: Trainer) -> bool:
    """Look at what the user's code has done to the model; returns whether it has to be judged after the pass."""
    settled = trainer.open.running is None or trainer.open.leaves_early
    return bool(trainer.watch.look(trainer.step, settled=settled))


def _judge(trainer: Trainer) -> None:
    """Compare written parameters with those of the servers, if these can be pulled again with the same bits."""

    def again() -> None:
        trainer.weights.forget()
        _fetch(trainer)

    possible = trainer.open.running is None and trainer.half.exact is not None and trainer.methods.applied is None
    possible = possible and all(down.is_view for down in codecs.of(trainer.job).downs)
    trainer.watch.judge(trainer.step, again if possible else None)


def _fetch(trainer: Trainer) -> Mapping[int, ShardOutcome]:
    """Pull the parameters of the worker's current step."""
    weights, exchange, step = trainer.weights, trainer.exchange, trainer.half.exact
    want = Want(step=step, have_step=weights.have, wait_s=exchange.timeouts.server_wait_s)
    tasks = {s: ShardTask(shard=s, contributions=[], want=own) for s, own in trainer.open.share.asks(want).items()}
    weights.begin_pull(hold=False)
    outcomes = exchange.start(trainer.sender, tasks, weights.arrivals.end, weights.pulling).wait()
    trainer.methods.versions = weights.settle(step)
    return outcomes


def _numbered(plan: Plan, values: Mapping[str, torch.Tensor], kind: TensorKind) -> dict[int, torch.Tensor]:
    numbers = plan.kinds[kind]
    return {number: tensor for name, tensor in values.items() if (number := numbers[name]) is not None}


class OpenStep:
    """The step that is open for contributions: its pushes, and their progress. Used by the computing thread."""

    def __init__(self, methods: WorkerMethods, tools: PushTools, early: AsComputed | None) -> None:
        self._methods = methods
        self._tools = tools
        self._staging = tools.staging
        self._early = early
        self._ranks = bucket_ranks(tools.plan, range(len(tools.plan.tensors)))
        self.first = True
        """The first step after a (re)start: parts of a block may already be counted."""
        self.share = Share(tools.plan)
        """What the worker exchanges."""
        self.pushes: dict[int, list[Push]] = {}
        """By shard; made once, so that retries send the same."""
        self.target: int | None = None
        """The step to pull after the pushes; None = the latest."""
        self.running: Running | None = None
        """The running exchange."""
        self.sent = False
        """send() was called, and settle() has not closed the step yet."""

    @property
    def failed(self) -> bool:
        return self.sent and self.running is not None and self.running.failed

    @property
    def leaves_early(self) -> bool:
        """Whether gradients are expected to leave, or have left, during the backward pass."""
        return self._early is not None and self._early.armed

    @property
    def uses(self) -> dict[int, None] | None:
        """Tensors in the order of their first use, which the gate fills in the first step; None if not asked for."""
        return self._early.uses if self._early is not None and self.first else None

    def task(self, shard: int, want: Want, *, patience_s: float) -> ShardTask:
        pushes = self.pushes[shard]
        # Where nobody else contributes, only what is pushed changes.
        alone = self._methods.half.presums and self._methods.held.replicas == 1
        moves = sum([push.payloads.nbytes for push in pushes]) if alone else None
        return ShardTask(shard=shard, contributions=pushes, want=want, patience_s=patience_s, moves=moves)

    def kept_buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the contributed buffers, by name."""
        tensors = self._tools.plan.tensors
        found = self._staging.buffers().items()
        return {tensors[number].name: values.view(tensors[number].shape) for number, values in found}

    @property
    def presums(self) -> bool:
        """Whether gradients of the worker's replicas are added up before they are sent."""
        # Rounding a sum is not summing rounded parts: with a lossy codec the bits would depend on the assignment.
        exact = self._methods.half.presums and self._staging.encoders.coding.exact
        return exact and not self.first and not self.share.partial

    def make_pushes(self) -> None:
        """Make the pushes if all gradients were computed before any left."""
        share, ranks = self.share, self._early.ranks if self._early is not None else self._ranks
        # Every block was added to all buckets, unless there are stages.
        blocks = self._staging.blocks(share.keys if share.partial else share.keys[:1])
        alone = not self._methods.half.shares_steps
        skip = bool(self._staging.extras.nonfinite) and alone
        if alone and len(blocks) > 1:
            raise ProtocolError("asynchronous mode takes one contribution per step")
        for shard in share.shards:
            self.pushes[shard] = []
            stamp = self._stamp(shard)
            for block in blocks:
                buckets = range(len(self._tools.plan.shards[shard].buckets))
                coming = [b for b in buckets if self._staging.added((shard, b), block)] if share.partial else buckets
                if not coming:
                    continue
                payloads = Whole() if skip else filled_payloads(self._tools, shard, block, ranks[shard], coming)
                made = self._staging.contribution(block, payloads, stamp, skip=skip, partial=share.partial)
                self.pushes[shard].append(made)
        self.target = self._methods.half.target

    def push_early(self, block: Block, payloads: Mapping[int, Payloads]) -> None:
        """Make the pushes of gradients that leave as they are computed."""
        made = self._staging.contribution
        self.pushes = {shard: [made(block, items, self._stamp(shard))] for shard, items in payloads.items()}
        self.target = self._methods.half.target

    def _stamp(self, shard: int) -> Stamp:
        """Of a shard's pushes in this step; what is encoded for it from now on belongs to them."""
        stamp = self._methods.half.stamp(shard)
        self._staging.encoders.begin(shard, stamp.number)
        return stamp

    def close(self) -> None:
        """Free the pushes, which are acknowledged or given up. Raises the same errors as LivePayloads.drop()."""
        if self._early is not None:
            self._early.end_step()
        for push in (push for pushes in self.pushes.values() for push in pushes):
            if isinstance(push.payloads, LivePayloads):
                push.payloads.drop()
        self.pushes, self.target, self.running, self.sent = {}, None, None, False
        self._staging.clear()


class WorkerMethods:
    """A worker's progress in its job, and its half of the job's cadence, as long as its process trains: across
    servers, plans and timelines. Used by the computing thread.

    tensors: the model's, by name.
    """

    def __init__(self, job: JobSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        self._job = job
        self.mode = consistency.of(job.consistency)
        self.half = self.mode.worker_half(job)
        self.cadence = cadences.of(job)
        self.ticks = Ticks(self.cadence.rounds)
        self.parts = parts = division.of(job)
        applies = job.apply == WORKER
        self.streams = self.cadence.sends is Sends.GRADIENTS and not applies
        """Gradients are sent just as backward() computes them, so that they may leave before all are computed."""
        self.copies = self.cadence.sends is Sends.DELTAS or parts.goes_back
        """Passes compute with other tensors than those that pulls fill."""
        names = [spec.name for spec in job.tensors if spec.name in tensors]

        def copied() -> dict[str, torch.Tensor]:
            return {name: tensors[name].detach().clone() for name in names}

        pulled = copied() if self.copies or applies else tensors
        inner = InnerOptimizers(job.inner, job.tensors, tensors) if job.inner is not None else None
        self.held = Held(
            # The optimizer needs tensors that stay; those of passes are pointed at one version and another.
            model=copied() if applies and parts.goes_back else tensors,
            pulled=pulled,
            specs=job.tensors,
            inner=inner,
            replicas=job.replicas,
            contributors=self.mode.contributors(job.replicas),
            brings_buffers=self.half.brings_buffers,
        )
        self.applied = WorkerOptimizer(job, self.held) if applies else None
        """Runs the job's optimizer here on what the servers sum; None: they run it."""
        self.local = self.applied or self.cadence.local(self.held)
        self.arrived: Mapping[str, torch.Tensor] = self.held.model if applies else pulled
        """The tensors of the newest step that has arrived, by name."""
        self._ahead = False
        """The open step has begun before its parameters have arrived."""
        self._encoders: PushEncoders | None = None
        self.versions: Mapping[int, int] = {}
        """Version of each shard's parameters, as they were last pulled."""

    def encoders(self, coding: Coding, index: int) -> PushEncoders:
        """Encoders for the pushes of worker `index` under a plan; takes over the previous plan's error memory."""
        job = self._job
        made = PushEncoders(
            coding,
            seed=job.seed,
            sender=None if self.half.shares_steps else index,
            keep_every=job.checkpoint_every,
            # Nothing may be owed after these.
            cut_after=lambda number: job.error_memory == EXACT and codecs.sent_whole(job, number + 1),
        )
        if self._encoders is not None:
            made.inherit(self._encoders)
        self._encoders = made
        return made

    @property
    def goes_on(self) -> bool:
        """Whether the next step begins while this one is exchanged."""
        return self.cadence.rounds.overlap > 0 or self.parts.goes_back

    @property
    def needs_pull(self) -> bool:
        """Whether the open pass needs the parameters of its step to begin. Cadences that stream wait per layer."""
        return not self.streams and self.ticks.tick >= self.cadence.rounds.overlap

    def restart(self, outcomes: Mapping[int, ShardOutcome]) -> None:
        """Start the open step over with the servers' parameters. Raises UnreachableError, Restart."""
        self._ahead = False
        self.next_step(outcomes, located=True)

    def sent(self) -> None:
        """Advance after the open step was sent. With an overlap the next one begins now."""
        self.half.advance()
        if self.cadence.rounds.overlap:
            self._begin()
            self._ahead = True

    def next_step(self, outcomes: Mapping[int, ShardOutcome], *, located: bool = False) -> None:
        """The parameters of the next step have arrived: begin it, unless it has begun already."""
        if not self._ahead:
            self._begin()
        self._ahead = False
        wants_state = [shard for shard, outcome in outcomes.items() if outcome.wants_state]
        hyper = {group: numbers for outcome in outcomes.values() for group, numbers in outcome.hyper.items()}
        self.local.arrived(self.half.step, Told(located=located, wants_state=wants_state, hyper=hyper))

    def _begin(self) -> None:
        self.ticks.begin(self.half.step)
        self.local.began(self.half.step)


class PushTraffic:
    """Counts pushed bytes; the sinks count pulled ones."""

    def __init__(self, sinks: Mapping[int, PullSink]) -> None:
        self._sinks = sinks
        self._pushed = {shard: [0, 0] for shard in sinks}
        self._taken: dict[int, tuple[int, ...]] = {}

    def pushed(self, shard: int, pushes: Iterable[Push], *, on_wire: bool) -> None:
        """Count acknowledged pushes. A retry's bytes count once; bytes in shared memory are not wire bytes."""
        for push in pushes:
            if isinstance(push.payloads, (LivePayloads, ReadyPayloads)):
                self._pushed[shard][0] += push.payloads.raw_bytes
                self._pushed[shard][1] += push.payloads.wire_bytes if on_wire else 0

    def _now(self, shard: int) -> tuple[int, ...]:
        return (*self._pushed[shard], self._sinks[shard].raw_bytes, self._sinks[shard].wire_bytes)

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes so far: pushed raw, pushed wire, pulled raw, pulled wire."""
        return tuple(map(sum, zip(*map(self._now, self._sinks), strict=True)))

    def take(self, shard: int) -> list[tuple[str, int, int]]:
        """("push" or "pull", raw, wire) bytes with one shard since the last call."""
        now, before = self._now(shard), self._taken.get(shard, (0, 0, 0, 0))
        self._taken[shard] = now
        push_raw, push_wire, pull_raw, pull_wire = (a - b for a, b in zip(now, before, strict=True))
        return [("push", push_raw, push_wire), ("pull", pull_raw, pull_wire)]


class RetainedContribution:
    """A contribution to one step, and the worker's position at that time. Used by one thread.

    parts: by replica.
    """

    def __init__(self, mark: ComputedAt, parts: Mapping[int, Outgoing]) -> None:
        self.mark = mark
        self._parts = {replica: part if part.keep else _copied(part) for replica, part in parts.items()}
        self._kept = False
        self._began_s = time.monotonic()

    def keep(self, trainer: Trainer, *, shared: bool) -> None:
        """Make the contribution independent of the trainer that took it; call before that trainer gives it up.

        Since the push began, the model's buffers are those of theta_t again, or already those being pulled; the
        contribution's own are only in the trainer's staging. shared: gradients may be in segments of its lanes.
        """
        if self._kept:
            return
        self._kept = True
        buffers = trainer.open.kept_buffers()
        for replica, part in self._parts.items():
            own = {name: buffers[name] for name in part.buffers if name in buffers}
            self._parts[replica] = replace(_copied(part) if shared else part, buffers=own, keep=True)

    def contribute(self, trainer: Trainer) -> None:
        """Contribute the same bits again to the step that a trainer has located. Raises like Trainer.contribute."""
        trainer.half.resume(self.mark)
        for replica, part in self._parts.items():
            trainer.hand_over(replica, part)

    def accept(self, half: WorkerHalf) -> StepFigures:
        """Close the step of a contribution that is counted; the model already contains the result."""
        skipped = half.accept(self.mark)
        return StepFigures(
            seconds=time.monotonic() - self._began_s, computed_s=self._began_s, outcomes={}, skipped=skipped
        )


def _copied(part: Outgoing) -> Outgoing:
    return replace(part, values={name: gradient.detach().clone() for name, gradient in part.values.items()}, keep=True)
