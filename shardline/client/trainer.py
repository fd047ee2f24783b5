"""A worker's side of training: where it stands, what it sends, what it gets. PROTOCOL 1.4 and 1.5."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from shardline.client.arrivals import Arrivals, Key
from shardline.client.device import ON_HOST, host_path
from shardline.client.exchange import Exchange, Restart, Running, ShardTask, StepFigures
from shardline.client.finite import loss_names, stop_error
from shardline.client.layout import BucketSink, ModelLayout
from shardline.client.live import LivePayloads, drop_all
from shardline.client.overlap import (
    EarlyPush,
    Expected,
    FireCount,
    GradientHooks,
    filled_payloads,
    homes,
    keys_of,
    not_stepped,
    why_not_early,
)
from shardline.client.priority import bucket_ranks, pull_order
from shardline.client.staging import Staging, initial_contribution
from shardline.client.traffic import Traffic
from shardline.client.zero_copy import ZeroCopy, check_shareable
from shardline.config import Timeouts
from shardline.consistency.decision import Outcome
from shardline.errors import JobError, ProtocolError, UnreachableError
from shardline.identity import Identity
from shardline.lanes.base import Contribution, Lane, Payloads, Sender, Standing, Want, Whole
from shardline.reduce import Block, cover
from shardline.rpc.client import JobView
from shardline.spec import TensorKind
from shardline.wire.codecs import RAW

log = logging.getLogger("shardline.client")

PATIENCE = 5.0
"""A call waits for gradients as many times longer than the longest computation so far."""
LONGEST_WAIT_S = 600.0
"""What a server holds a pull at most."""


class Trainer:
    """Gradients in, parameters out, for one worker and all shards. Used by one thread.

    lanes: by shard. replicas: R of the job. The model's tensors are written by pulls.
    overlap: gradients may leave during the backward pass (expect()).
    credit_bytes: see SendQueue; 0 = derived from the buckets.
    zero_copy: tensors may lie in shared memory, see shardline.client.zero_copy. Raises UsageError where they can't.
    """

    def __init__(
        self,
        view: JobView,
        tensors: Mapping[str, torch.Tensor],
        lanes: Mapping[int, Lane],
        timeouts: Timeouts,
        *,
        who: Identity,
        index: int,
        on_retry: Callable[[int], None] = lambda shard: None,
        overlap: bool = False,
        zero_copy: bool = False,
        credit_bytes: int = 0,
    ) -> None:
        self.job = view.job
        self.plan = view.plan
        self.is_sync = view.job.consistency.mode == "sync"
        self.layout = ModelLayout(view.plan, tensors)
        self.arrivals = Arrivals((s, b) for s, shard in enumerate(view.plan.shards) for b in range(len(shard.buckets)))
        self._gpu = host_path(self.layout.tensors)
        self._host = self._gpu or ON_HOST
        self.sinks = {
            s: BucketSink(self.layout, s, view.job.codec, self.arrivals, host=self._gpu)
            for s in range(len(view.plan.shards))
        }
        self.exchange = Exchange(lanes, self.sinks, timeouts, index=index, on_retry=on_retry)
        self._lanes = lanes
        self._timeouts = timeouts
        self._sender = Sender(
            job=view.job.name,
            timeline=view.timeline,
            plan_id=view.plan.plan_id,
            who=who,
        )
        self.staging = Staging(
            view.plan, view.job.replicas if self.is_sync else 1, view.job.codec, self._allocate, self._gpu
        )
        self.step = 0
        """Synchronous: the step whose parameters the model holds, or will hold when what is under way has come."""
        self._have: int | None = None
        """Step of the parameters in the model's tensors, where they are known to be whole."""
        self.acknowledged = dict.fromkeys(self.sinks, 0)
        """Asynchronous: number of this worker's last push that each shard has applied."""
        self.base = dict.fromkeys(self.sinks, 0)
        """Version of the parameters in the model, by shard; a broken exchange leaves it."""
        self._first = True
        """The first step after a (re)start: parts of a block may be counted already."""
        self._tensor_of = {spec.name: number for number, spec in enumerate(view.plan.tensors)}
        self._homes = homes(view.plan)
        self._buffer_keys = keys_of(self._homes, self.layout.buffers)
        self.meter = Traffic(self.sinks)
        self._zero: ZeroCopy | None = None
        if zero_copy:
            self._share()
        self.on_nonfinite: Callable[[str], None] = lambda name: None
        """Called with "loss" or a tensor's name when it is not finite."""
        # The open step
        self._pushes: dict[int, list[Contribution]] = {}
        """By shard, made once: retries send the same."""
        self._running: Running | None = None
        self._finished = False
        """send() was called for the open step."""
        self._start_s = self._computed_s = 0.0
        self._touched = False
        """A forward pass of the open step may have changed the model's buffers."""
        # Overlap
        self.uses: dict[int, None] | None = {} if overlap else None
        """Tensors in the order of their first use; filled in the first step by who watches the forward pass."""
        self._hooks = GradientHooks(view.plan, self.layout.tensors) if overlap else None
        self._count: FireCount | None = None
        self._once: set[int] = set()
        self._ranks = bucket_ranks(view.plan, range(len(view.plan.tensors)))
        self._sent_order: dict[int, list[int]] = {}
        """By shard, as buckets left in the step before."""
        self._credit_bytes = credit_bytes
        self._early: EarlyPush | None = None
        self._expected: Expected | None = None
        self._told: set[str] = set()
        self._began_s = 0.0
        self._longest_s = 0.0
        """Longest computation of a step so far."""

    def _allocate(self, shard: int, bucket: int, nbytes: int) -> memoryview | None:
        allocate = getattr(self._lanes[shard], "allocate", None)
        return allocate(bucket, nbytes) if allocate is not None else None

    def map_parameters(self) -> list[str]:
        """Let tensors lie in shared memory from now on, where lanes and plan allow it; returns their names.

        Called between steps, after locate(). See shardline.client.zero_copy for what it costs whoever writes to them.
        Raises UsageError where the job can't have it.
        """
        zero = self._share()
        # Every bucket comes once more, to stay where it lies.
        self._have = None
        self._pull(self.step)
        return zero.tensors

    def _share(self) -> ZeroCopy:
        if self._zero is None:
            check_shareable(self.job)
            self._zero = ZeroCopy(self.plan, self.layout, self._lanes)
            for sink in self.sinks.values():
                sink.zero_copy = self._zero
        return self._zero

    def gradient_view(self, name: str) -> torch.Tensor | None:
        """Memory that the shard reads, to compute this tensor's gradient in; None where there is none (left)."""
        # What another replica of this worker has computed there is not sent yet.
        free = self._zero is not None and not self.staging.has_gradients
        return self._zero.gradient(self._tensor_of[name]) if self._zero is not None and free else None

    def lane(self, shard: int) -> str:
        """Name of the lane by which a shard's bytes travel at present."""
        return self._lanes[shard].name

    # Starting

    def initialize(self) -> None:
        """Send the model's values as the job's first ones (Orders.init)."""
        tasks = {}
        for shard in self.sinks:
            buckets = range(len(self.plan.shards[shard].buckets))
            values = [self.layout.values(shard, bucket) for bucket in buckets]
            push = initial_contribution(self.plan, shard, values)
            tasks[shard] = ShardTask(shard=shard, contributions=[push], want=None)
        self.exchange.run(self._sender, tasks)

    def locate(self, replicas: Iterable[int], timeline: int) -> set[int]:
        """Find the step to work on, pull its parameters; returns the replicas that still have to contribute to it.

        Nothing may be under way: see give_up().
        """
        self._sender = replace(self._sender, timeline=timeline)
        self._have, self._first = None, True
        self._close_step()
        owned = sorted(replicas)
        if not self.is_sync:
            self._pull_latest()
            return set(owned)
        standings = [self.standing(shard, owned) for shard in sorted(self._lanes)]
        steps = {replica: min(standing.replicas[replica] for standing in standings) for replica in owned}
        self.step = min(steps.values())
        self._pull(self.step)
        return {replica for replica, step in steps.items() if step == self.step}

    def standing(self, shard: int, replicas: Sequence[int]) -> Standing:
        """What a shard has counted of these replicas. Raises Restart, Interrupted, UnreachableError."""
        standing = self.exchange.progress(self._sender, shard, replicas)
        if standing.outcome is not Outcome.SERVED:
            raise Restart(f"shard {shard}: {standing.outcome.name.lower()}: {standing.reason}")
        return standing

    def _pull(self, step: int) -> None:
        self._pull_all(Want(step=step, have_step=self._have, wait_s=self._timeouts.server_wait_s))
        self._arrived(step)

    def _pull_latest(self) -> None:
        self.acknowledged = {shard: self.standing(shard, []).last_seq for shard in sorted(self._lanes)}
        self._pull_all(Want(step=None, wait_s=self._timeouts.server_wait_s))
        self._arrived(None)

    def _pull_all(self, want: Want) -> None:
        self._host.fence()
        self.arrivals.begin(hold=False)
        tasks = {shard: ShardTask(shard=shard, contributions=[], want=want) for shard in self.sinks}
        self.exchange.start(self._sender, tasks, self.arrivals.end).wait()

    def _arrived(self, step: int | None) -> None:
        """All buckets of a pull are in the model."""
        self._host.join(self.arrivals.keys)
        with torch.no_grad():
            self.layout.settle()
        if self._zero is not None and step is not None:
            self._zero.settle(step)
        self._have = step
        self.base = {shard: sink.base_version for shard, sink in self.sinks.items()}
        if step is not None:
            self.step = step
        self._close_step()

    def _close_step(self) -> None:
        """The open step's pushes are acknowledged or given up: free what they held. Raises as LivePayloads.drop()."""
        if self._hooks is not None:
            self._hooks.ignore()
        drop_all(push.payloads for pushes in self._pushes.values() for push in pushes)
        if self._early is not None:
            self._early.drop()
        self._early = self._expected = self._running = None
        self._pushes = {}
        self._finished = False
        self.staging.clear()

    def give_up(self) -> None:
        """End what is under way; what arrived of it is of no use. arm() the exchange before the next one.

        Raises UnreachableError where it doesn't end.
        """
        if self._running is not None:
            self.arrivals.end()
            self.exchange.give_up()
        self._touched = False
        self._close_step()

    # A step

    @property
    def pending(self) -> bool:
        """Whether send() was called for a step that settle() has not ended."""
        return self._finished

    @property
    def starting(self) -> bool:
        """Whether the open step is the first one after a (re)start."""
        return self._first

    @property
    def pending_failed(self) -> bool:
        """Whether what is pending has failed: settle() would raise."""
        return self._finished and self._running is not None and self._running.failed

    def begin(self) -> None:
        """Before each replica's forward pass: buffers are those of theta_t, whatever replica ran before."""
        self._began_s = time.monotonic()
        # Where nobody has run on what arrives at present, it is as it should be.
        if self._touched or not self._finished:
            if self._finished:
                self._load(self._buffer_keys)
            with torch.no_grad():
                self.layout.restore()
        self._touched = True

    def wait_for(self, tensors: Iterable[int]) -> None:
        """Return when these tensors (numbers in the plan) hold the values of `step`.

        Raises what ended the exchange where it did not bring them; settle() raises it again.
        """
        numbers = list(tensors)
        self._load(keys_of(self._homes, [n for n in numbers if self.plan.tensors[n].kind is not TensorKind.FROZEN]))
        with torch.no_grad():
            self.layout.settle(numbers)

    @property
    def waiting(self) -> bool:
        """Whether wait_for() may have anything to do."""
        return self._finished and (self.arrivals.waiting or self.layout.unsettled or self._host.unjoined)

    def _load(self, keys: Iterable[Key]) -> None:
        keys, running = list(keys), self._running
        if self.arrivals.load(keys, running.look if running is not None else lambda: None):
            self._host.join(keys)
            return
        if running is not None:
            running.wait()
        raise ProtocolError("a pull ended well without all the buckets it was to bring")

    def settle(self) -> StepFigures | None:
        """Wait until everything that is pending has come; None where nothing was. Raises as finish() does."""
        return self._complete() if self._finished else None

    def expect(self, expected: Expected) -> None:
        """Right before the last backward pass of a replica: let its gradients leave as they are computed, if they may.

        Otherwise contribute() and finish() send them. Nothing may be pending. Raises NonFiniteError as contribute(),
        JobError as check_stepped().
        """
        hooks = self._hooks
        if hooks is None:
            return
        self.check_stepped()
        self.disarm()
        if not self._once:
            # How often hooks are called is seen in the first step; nothing leaves early in it.
            self._count = FireCount()
            hooks.listen(self._count)
            return
        reason = why_not_early(self.job, expected, first=self._first)
        if reason:
            if reason not in self._told:
                self._told.add(reason)
                log.debug("step %d: gradients leave when the step ends: %s", self.step, reason)
            return
        self._judge(expected.replica, loss_names(expected.loss))
        self._expected = expected
        self.staging.extras.samples[expected.replica] = expected.samples
        block = cover(expected.owned, self.job.replicas)[0] if self.is_sync else Block(0, 1)
        self._early = EarlyPush(
            self.plan,
            self.staging,
            replica=expected.replica if self.is_sync else 0,
            block=block,
            presum=block.count > 1,
            once=self._once,
            ranks=self._ranks,
            credit_bytes=self._credit_bytes,
            begin=self._begin_early,
            on_nonfinite=functools.partial(self._judge, expected.replica, early=True, step=self.step),
            interrupted=self.exchange.refusal,
            host=self._gpu,
        )
        hooks.listen(self._early)

    def check_stepped(self) -> None:
        """Every backward pass that sent something was followed by its step. Raises JobError after giving it up."""
        early = self._early
        if early is None or not early.begun or self._finished:
            return
        error = early.error or not_stepped(self.step)
        early.fail(error)
        self.give_up()
        raise error

    def disarm(self) -> None:
        """Expect no backward pass any more; what has begun to leave stays as it is."""
        if self._hooks is None or self._finished or (self._early is not None and self._early.begun):
            return
        self._hooks.ignore()
        if self._early is not None:
            self._early.drop()
        self._early = self._expected = None

    def _begin_early(self) -> None:
        """The first bucket is ready. Called by a hook, during the backward pass."""
        assert self._early is not None and self._expected is not None
        if self._expected.replica == 0:
            self.staging.extras.hyper = self._expected.hyper()
        block, early = self._early.block, self._early.payloads
        self._pushes = {shard: [self._push(shard, payloads, block)] for shard, payloads in early.items()}
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
    ) -> None:
        """Take one replica's gradients (by tensor name; absent = None in torch) for the present step.

        keep: the tensors stay as they are until the step is closed, so they need not be copied.
        Raises NonFiniteError naming loss or tensor under the policy "stop"; nothing has left this worker then, except
        buckets that left during the backward pass. JobError where gradients changed after they had left.
        """
        self._longest_s = max(self._longest_s, time.monotonic() - self._began_s if self._began_s else 0.0)
        numbers = {}
        for name, gradient in gradients.items():
            number = self._tensor_of[name]
            if self.plan.tensors[number].kind is TensorKind.PARAM:
                numbers[number] = gradient
        # In asynchronous mode every worker's buffers are taken: there is no replica 0 to wait for.
        takes_buffers = replica == 0 or not self.is_sync
        buffers = self.layout.changed_buffers() if takes_buffers else {}
        if self._early is not None:
            self._judge(replica, loss_names(loss), early=True)
            self._close_early(numbers, buffers, hyper)
            return
        bad = loss_names(loss)
        # Rounding a sum is not summing rounded parts: a lossy codec would make the bits depend on who runs what.
        presum = self.is_sync and not self._first and self.job.codec == RAW.name
        self.staging.extras.samples[replica] = samples
        if hyper and replica == 0:
            self.staging.extras.hyper = hyper
        with torch.no_grad():
            bad += self.staging.add(replica if self.is_sync else 0, numbers, buffers, presum=presum, keep=keep)
        self._judge(replica, bad)

    def _close_early(
        self,
        numbers: Mapping[int, torch.Tensor],
        buffers: Mapping[int, torch.Tensor],
        hyper: Mapping[int, Mapping[str, float]] | None,
    ) -> None:
        early, expected = self._early, self._expected
        assert early is not None and expected is not None and self._hooks is not None
        self._hooks.ignore()
        try:
            with torch.no_grad():
                early.close(numbers, buffers)
            if expected.replica == 0 and (hyper or {}) != self.staging.extras.hyper:
                raise JobError(
                    "a parameter group's numbers (lr ...) were changed after the backward pass had sent gradients with "
                    "the ones before; change them before backward(), or attach(..., overlap=False)"
                )
            if early.error is not None:
                raise early.error
        except Exception as error:
            early.fail(error)
            raise

    def _judge(self, replica: int, bad: Sequence[str], *, early: bool = False, step: int | None = None) -> None:
        """What follows from a loss ("loss") or gradients that are not finite. Raises NonFiniteError under "stop"."""
        if not bad:
            return
        for name in bad:
            self.on_nonfinite(name)
        if self.job.consistency.nan_policy == "stop":
            if not early:
                self.staging.clear()
            raise stop_error(self.step if step is None else step, replica, bad, early=early)
        if not early:
            named = self.staging.extras.nonfinite
            named.extend(name for name in bad if name not in named)

    def finish(self, *, clip_scale: float = 1.0) -> StepFigures:
        """Send what was contributed, get the next parameters. Raises Restart, Stopped or Interrupted."""
        self._send(clip_scale)
        return self._complete()

    def send(self) -> None:
        """finish() without waiting: wait_for() and settle() say when the parameters of the next `step` have come."""
        self._send(1.0)
        self._finished = True
        self.step += 1

    def _send(self, clip_scale: float) -> None:
        self._computed_s = time.monotonic()
        if not self._pushes:
            self._make_pushes(clip_scale)
        with torch.no_grad():
            self.layout.restore()
        self._touched = False
        if self._running is None:
            self._start(hold=False)
        if self.arrivals.holding:
            self._host.fence()
            self.arrivals.release()

    def _make_pushes(self, clip_scale: float) -> None:
        """The pushes of gradients that were all computed before any left."""
        blocks = self.staging.blocks()
        skip = bool(self.staging.extras.nonfinite) and not self.is_sync
        if not self.is_sync and len(blocks) != 1:
            raise ProtocolError("asynchronous mode takes one contribution per step")
        filled = functools.partial(
            filled_payloads,
            self.plan,
            self.staging,
            credit_bytes=self._credit_bytes,
            interrupted=self.exchange.refusal,
        )
        for shard, ranks in enumerate(self._ranks):
            found = [(block, Whole() if skip else filled(shard, block, ranks=ranks)) for block in blocks]
            self._pushes[shard] = [self._push(shard, p, block, scale=clip_scale, skip=skip) for block, p in found]

    def _push(
        self, shard: int, payloads: Payloads, block: Block, *, scale: float = 1.0, skip: bool = False
    ) -> Contribution:
        push = self.staging.contribution(block, payloads)
        if self.is_sync:
            return replace(push, step=self.step)
        base = self.base[shard]
        return replace(push, seq=self.acknowledged[shard] + 1, base_min=base, base_max=base, scale=scale, skip=skip)

    def _start(self, *, hold: bool, compute_s: float = 0.0) -> None:
        """Begin the exchange of the open step with all shards. compute_s: how long gradients may take to come."""
        patience_s = self._timeouts.rpc_s + PATIENCE * compute_s if hold else 0.0
        wait_s = min(LONGEST_WAIT_S, self._timeouts.server_wait_s + compute_s)
        tasks = {}
        for shard, pushes in self._pushes.items():
            if self.is_sync:
                want = Want(step=pushes[0].step + 1, have_step=self._have, wait_s=wait_s)
            else:
                want = Want(step=None, have_step=self.sinks[shard].base_step, wait_s=wait_s)
            for push in pushes:
                if isinstance(push.payloads, LivePayloads):
                    push.payloads.patience_s = patience_s or self._timeouts.rpc_s
            want = replace(want, buckets=self._wanted(shard, hold=hold))
            tasks[shard] = ShardTask(shard=shard, contributions=pushes, want=want, patience_s=patience_s)
        self._have = None
        self._start_s = time.monotonic()
        if not hold:
            self._host.fence()
        self.arrivals.begin(hold=hold)
        self._running = self.exchange.start(self._sender, tasks, self.arrivals.end)

    def _wanted(self, shard: int, *, hold: bool) -> list[int]:
        """Buckets in the order in which to ask for them; [] = the plan's."""
        if self._hooks is None:
            return []
        terms = self.job.consistency
        eager = self.is_sync and terms.clip_norm == 0.0 and terms.nan_policy == "stop"
        return pull_order(self._ranks[shard], at_once=not eager or not hold, sent=self._sent_order.get(shard, ()))

    def _complete(self) -> StepFigures:
        """Wait for the running exchange, close the step. One that has failed before is made again, with the same."""
        if self._running is None:
            self._start(hold=False)
        assert self._running is not None
        try:
            outcomes = self._running.wait()
            seconds = self._running.ended_s - self._start_s
            self._load(self.arrivals.keys)
        finally:
            self._running = None
        for shard, pushes in self._pushes.items():
            self.meter.pushed(shard, pushes, lane=self.lane(shard))
        self._learn()
        target = self.step if self._finished else self.step + 1
        for shard in outcomes:
            self.acknowledged[shard] += 1
        base, dropped = self.base, any(push.skip for (push, *_) in self._pushes.values())
        self._arrived(target if self.is_sync else None)
        self.step = target
        self._first = False
        skipped = self.stood_still(base) if self.is_sync else dropped
        return StepFigures(seconds=seconds, computed_s=self._computed_s, outcomes=outcomes, skipped=skipped)

    def stood_still(self, base: Mapping[int, int]) -> bool:
        """Synchronous: whether the step since these versions made no new one of any shard: all have skipped it."""
        return self.job.consistency.nan_policy == "skip" and self.base == base

    def _learn(self) -> None:
        """After a step: what was seen in it of the order of things."""
        if self._count is not None and not self._once:
            self._once = self._count.once
            self._ranks = bucket_ranks(self.plan, list(self.uses) if self.uses else range(len(self.plan.tensors)))
        if self._early is not None:
            self._sent_order = {shard: payloads.order for shard, payloads in self._early.payloads.items()}

    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """Bytes so far: pushed raw, pushed wire, pulled raw, pulled wire."""
        return self.meter.total

    def close(self) -> None:
        """End threads and calls, free what lanes hold; leave the model without hooks."""
        if self._hooks is not None:
            self._hooks.close()
        self.arrivals.end()
        self.exchange.close()
        if self._zero is not None:
            self._zero.release()
        with contextlib.suppress(UnreachableError):
            self._close_step()
        self.staging.close()
