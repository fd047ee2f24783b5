"""A worker's side of training: where it stands, what it sends, what it gets. PROTOCOL 1.4 and 1.5."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from shardline.client.exchange import Exchange, Restart, ShardOutcome, ShardTask
from shardline.client.layout import BucketSink, ModelLayout
from shardline.client.staging import Staging, initial_contribution
from shardline.config import Timeouts
from shardline.consistency.decision import Outcome
from shardline.errors import NonFiniteError, ProtocolError
from shardline.lanes.base import Contribution, Lane, Sender, Want, Whole
from shardline.reduce import is_finite
from shardline.rpc.client import JobView
from shardline.spec import TensorKind
from shardline.wire.codecs import RAW

log = logging.getLogger("shardline.client")


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One finished exchange, for metrics and reports."""

    seconds: float
    staleness: int
    outcomes: Mapping[int, ShardOutcome]


class Trainer:
    """Gradients in, parameters out, for one worker and all shards. Used by one thread.

    lanes: by shard. replicas: R of the job. The model's tensors are written by pulls.
    """

    def __init__(
        self,
        view: JobView,
        tensors: Mapping[str, torch.Tensor],
        lanes: Mapping[int, Lane],
        timeouts: Timeouts,
        *,
        task: str,
        incarnation: int,
        index: int,
        on_retry: Callable[[int], None] = lambda shard: None,
    ) -> None:
        self.job = view.job
        self.plan = view.plan
        self.is_sync = view.job.consistency.mode == "sync"
        self.layout = ModelLayout(view.plan, tensors)
        self.sinks = {s: BucketSink(self.layout, s, view.job.codec) for s in range(len(view.plan.shards))}
        self.exchange = Exchange(lanes, self.sinks, timeouts, index=index, on_retry=on_retry)
        self._lanes = lanes
        self._timeouts = timeouts
        self._sender = Sender(
            job=view.job.name,
            timeline=view.timeline,
            plan_id=view.plan.plan_id,
            task=task,
            incarnation=incarnation,
        )
        self._staging = Staging(view.plan, view.job.replicas if self.is_sync else 1, view.job.codec)
        self._snapshot = self.layout.snapshot()
        self.step = 0
        """Synchronous: the step whose parameters the model holds."""
        self._have: int | None = None
        """Step of the parameters in the model's tensors, where they are known to be whole."""
        self._seq = dict.fromkeys(self.sinks, 0)
        self._base = dict.fromkeys(self.sinks, 0)
        """Version of the parameters in the model, by shard; a broken exchange leaves it."""
        self._first = True
        """The first step after a (re)start: parts of a block may be counted already."""
        self._tensor_of = {spec.name: number for number, spec in enumerate(view.plan.tensors)}
        self._pushed = {shard: [0, 0] for shard in self.sinks}
        self.on_nonfinite: Callable[[str], None] = lambda name: None
        """Called with "loss" or a tensor's name when it is not finite."""
        self._metered: dict[int, tuple[int, int, int, int]] = {}

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
        """Find the step to work on, pull its parameters; returns the replicas that still have to contribute to it."""
        self._sender = replace(self._sender, timeline=timeline)
        self._have = None
        self._first = True
        owned = sorted(replicas)
        if not self.is_sync:
            self._pull_latest()
            return set(owned)
        steps = dict.fromkeys(owned, 0)
        for number, shard in enumerate(sorted(self._lanes)):
            standing = self.exchange.progress(self._sender, shard, owned)
            if standing.outcome is not Outcome.SERVED:
                raise Restart(f"shard {shard}: {standing.outcome.name.lower()}: {standing.reason}")
            for replica in owned:
                found = standing.replicas[replica]
                steps[replica] = found if number == 0 else min(steps[replica], found)
        self.step = min(steps.values())
        self._pull(self.step)
        return {replica for replica, step in steps.items() if step == self.step}

    def _pull(self, step: int) -> None:
        want = Want(step=step, have_step=self._have, wait_s=self._timeouts.server_wait_s)
        tasks = {shard: ShardTask(shard=shard, contributions=[], want=want) for shard in self.sinks}
        self.exchange.run(self._sender, tasks)
        self._arrived(step)

    def _pull_latest(self) -> None:
        for shard in sorted(self._lanes):
            standing = self.exchange.progress(self._sender, shard, [])
            if standing.outcome is not Outcome.SERVED:
                raise Restart(f"shard {shard}: {standing.outcome.name.lower()}: {standing.reason}")
            self._seq[shard] = standing.last_seq
        want = Want(step=None, wait_s=self._timeouts.server_wait_s)
        tasks = {shard: ShardTask(shard=shard, contributions=[], want=want) for shard in self.sinks}
        self.exchange.run(self._sender, tasks)
        self._arrived(None)

    def _arrived(self, step: int | None) -> None:
        """All buckets of a pull are in the model."""
        with torch.no_grad():
            self.layout.settle()
        self._have = step
        self._base = {shard: sink.base_version for shard, sink in self.sinks.items()}
        if step is not None:
            self.step = step
        self._snapshot = self.layout.snapshot()
        self._staging.clear()

    # A step

    def begin(self) -> None:
        """Before each replica's forward pass: buffers are those of theta_t, whatever replica ran before."""
        with torch.no_grad():
            self.layout.restore(self._snapshot)

    def contribute(
        self,
        replica: int,
        gradients: Mapping[str, torch.Tensor],
        *,
        samples: int = 0,
        loss: float | None = None,
        hyper: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """Take one replica's gradients (by tensor name; absent = None in torch) for the present step.

        Raises NonFiniteError naming loss or tensor under the policy "stop"; nothing has left this worker then.
        """
        numbers = {}
        for name, gradient in gradients.items():
            number = self._tensor_of[name]
            if self.plan.tensors[number].kind is TensorKind.PARAM:
                numbers[number] = gradient
        bad = self._nonfinite(numbers, loss)
        if bad:
            for name in bad:
                self.on_nonfinite(name)
            if self.job.consistency.nan_policy == "stop":
                raise NonFiniteError(
                    f"step {self.step}, replica {replica}: {_names(bad)} has NaN or infinity; nothing was sent. "
                    f"Lower the learning rate, clip gradients (clip_norm), or set nan_policy='skip'"
                )
            self._staging.extras.nonfinite.extend(name for name in bad if name not in self._staging.extras.nonfinite)
        # In asynchronous mode every worker's buffers are taken: there is no replica 0 to wait for.
        takes_buffers = replica == 0 or not self.is_sync
        buffers = self.layout.changed_buffers(self._snapshot) if takes_buffers else {}
        # Rounding a sum is not summing rounded parts: a lossy codec would make the bits depend on who runs what.
        presum = self.is_sync and not self._first and self.job.codec == RAW.name
        self._staging.extras.samples[replica] = samples
        if hyper and replica == 0:
            self._staging.extras.hyper = hyper
        with torch.no_grad():
            self._staging.add(replica if self.is_sync else 0, numbers, buffers, presum=presum)

    def _nonfinite(self, gradients: Mapping[int, torch.Tensor], loss: float | None) -> list[str]:
        bad = []
        if loss is not None and not (-float("inf") < loss < float("inf")):
            bad.append("loss")
        with torch.no_grad():
            bad.extend(self.plan.tensors[number].name for number, g in gradients.items() if not is_finite(g))
        return bad

    def finish(self, *, clip_scale: float = 1.0) -> StepFigures:
        """Send what was contributed, get the next parameters. Raises Restart, Stopped or Interrupted."""
        start_s = time.monotonic()
        with torch.no_grad():
            self.layout.restore(self._snapshot)
        outcomes = self._finish_sync() if self.is_sync else self._finish_async(clip_scale)
        lag = max((ack.staleness for outcome in outcomes.values() for ack in outcome.acks), default=0)
        self._first = False
        return StepFigures(seconds=time.monotonic() - start_s, staleness=lag, outcomes=outcomes)

    def _finish_sync(self) -> dict[int, ShardOutcome]:
        want = Want(step=self.step + 1, have_step=self._have, wait_s=self._timeouts.server_wait_s)
        self._have = None
        blocks = self._staging.blocks()
        tasks = {}
        for shard in self.sinks:
            pushes = [self._staging.contribution(shard, block, step=self.step) for block in blocks]
            self._count(shard, pushes)
            tasks[shard] = ShardTask(shard=shard, contributions=pushes, want=want)
        outcomes = self.exchange.run(self._sender, tasks)
        self._arrived(self.step + 1)
        return outcomes

    def _finish_async(self, clip_scale: float) -> dict[int, ShardOutcome]:
        skip = bool(self._staging.extras.nonfinite)
        blocks = self._staging.blocks()
        if len(blocks) != 1:
            raise ProtocolError("asynchronous mode takes one contribution per step")
        tasks = {}
        for shard, base in self._base.items():
            push = self._staging.contribution(
                shard,
                blocks[0],
                seq=self._seq[shard] + 1,
                base_min=base,
                base_max=base,
                scale=clip_scale,
                skip=skip,
            )
            if skip:
                push = replace(push, payloads=Whole())
            self._count(shard, [push])
            want = Want(step=None, have_step=self.sinks[shard].base_step, wait_s=self._timeouts.server_wait_s)
            tasks[shard] = ShardTask(shard=shard, contributions=[push], want=want)
        outcomes = self.exchange.run(self._sender, tasks)
        for shard in outcomes:
            self._seq[shard] += 1
        self.step += 1
        step = self.step
        self._arrived(None)
        self.step = step
        return outcomes

    def _count(self, shard: int, pushes: Iterable[Contribution]) -> None:
        for push in pushes:
            for item in (item for batch in push.payloads.batches() for item in batch):
                self._pushed[shard][0] += item.raw_bytes
                self._pushed[shard][1] += len(item.data)

    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """Bytes so far: pushed raw, pushed wire, pulled raw, pulled wire."""
        return (
            sum(raw for raw, _ in self._pushed.values()),
            sum(wire for _, wire in self._pushed.values()),
            sum(sink.raw_bytes for sink in self.sinks.values()),
            sum(sink.wire_bytes for sink in self.sinks.values()),
        )

    def take_traffic(self, shard: int) -> list[tuple[str, int, int]]:
        """("push" or "pull", raw, wire) bytes with one shard since the last call."""
        pushed, sink = self._pushed[shard], self.sinks[shard]
        now = (pushed[0], pushed[1], sink.raw_bytes, sink.wire_bytes)
        before = self._metered.get(shard, (0, 0, 0, 0))
        self._metered[shard] = now
        push_raw, push_wire, pull_raw, pull_wire = (a - b for a, b in zip(now, before, strict=True))
        return [("push", push_raw, push_wire), ("pull", pull_raw, pull_wire)]

    def close(self) -> None:
        """End threads and calls."""
        self.exchange.close()


def _names(bad: Iterable[str]) -> str:
    return ", ".join(name if name == "loss" else f"the gradient of {name!r}" for name in bad)
