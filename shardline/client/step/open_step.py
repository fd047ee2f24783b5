"""The open step of a worker: its pushes, made from the contributed gradients, and their progress."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardline.client.exchange.device import HostPath
from shardline.client.exchange.outcomes import ShardTask
from shardline.client.exchange.shard_exchange import Running
from shardline.client.exchange.streaming_payloads import (
    LivePayloads,
    ReadyPayloads,
    SendQueue,
    bucket_ranks,
    default_credit,
    drop_all,
)
from shardline.client.step.staging import GradientStaging
from shardline.client.step.worker_methods import WorkerMethods
from shardline.consistency.worker import Stamp
from shardline.core.plan import Plan
from shardline.core.reduce import Block
from shardline.division import Share
from shardline.errors import ProtocolError
from shardline.rpc.messages import data
from shardline.waist import Payloads, Push, Want, Whole


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Facts about a replica's part of a step that are known before its last backward pass."""

    replica: int
    owned: Sequence[int]
    """Replicas for which this worker contributes to the step."""
    samples: int = 0
    loss: float | None = None
    hyper: Callable[[], Mapping[int, Mapping[str, float]]] = dict
    """Hyper-parameters sent with the push, by group; called when the first bucket leaves."""


Values = Mapping[int, torch.Tensor]
"""By tensor number."""
Begin = Callable[[Block, Mapping[int, LivePayloads]], None]
"""(block, payloads by shard): called when the first bucket is ready, to start their exchange."""


class PushAtEnd:
    """Sends everything when the step ends. Used by the computing thread."""

    uses: dict[int, None] | None = None
    """Tensors in the order of their first use, filled in the first step by the gate; None if unused."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks = bucket_ranks(plan, range(len(plan.tensors)))

    @property
    def early(self) -> bool:
        """Whether gradients of the open step are expected to leave, or have left, during the backward pass."""
        return False

    @property
    def begun(self) -> bool:
        """Whether gradients of the open step may have left during the backward pass."""
        return False

    def ranks(self, shard: int) -> Sequence[int]:
        """Rank of each bucket of a shard, 0 = most urgent."""
        return self._ranks[shard]

    def pull_order(self, shard: int, *, hold: bool) -> list[int]:
        """Buckets in the order in which to request them; [] = the plan's. hold: the backward pass is still running."""
        return []

    def expect(self, expected: Expected, *, first: bool, begin: Begin) -> None:
        """Expect a replica's last backward pass. first: in the first step after a start. Raises NonFiniteError."""

    def close(self, gradients: Values, buffers: Values, hyper: Mapping[int, Mapping[str, float]]) -> None:
        """End the backward pass of an early push: the rest may leave. Raises any error of the pass."""
        raise AssertionError("nothing is sent early")

    def not_stepped(self, step: int) -> Exception:
        """End an early push that no step() followed; returns the error to raise."""
        raise AssertionError("nothing is sent early")

    def disarm(self) -> None:
        """Stop expecting a backward pass."""

    def end_step(self) -> None:
        """Free what the open step used; it is acknowledged or given up."""

    def learn(self) -> None:
        """Learn from a finished step: order of use and of sending."""

    def detach(self) -> None:
        """Remove all hooks from the model."""


@dataclass(frozen=True, kw_only=True)
class PushTools:
    """What is needed to make a worker's pushes."""

    plan: Plan
    staging: GradientStaging
    interrupted: Callable[[], Exception | None]
    credit_bytes: int = 0
    """See SendQueue; 0 = derived from the buckets."""
    gpu: HostPath | None = None
    """Set if the gradients are on a GPU."""


def filled_payloads(
    tools: PushTools, shard: int, block: Block, ranks: Sequence[int], buckets: Sequence[int]
) -> LivePayloads | ReadyPayloads:
    """A block's push to one shard, with these buckets, all in staging; each is encoded when it is sent.

    ranks: see SendQueue.
    """
    spec, staging = tools.plan.shards[shard], tools.staging
    empty: list[int] = []
    coming: list[int] = []
    for bucket in buckets:
        (empty if staging.is_empty((shard, bucket), block) else coming).append(bucket)
    nbytes = sum([spec.buckets[bucket].nbytes for bucket in coming])
    in_place = staging.in_place(shard, buckets)
    exact = staging.encoders.coding.is_view
    if nbytes <= data.SMALL_BYTES or (exact and nbytes <= data.QUICK_BYTES):
        # They leave in one message, so there is nothing to choose while others are encoded.
        items = [staging.payload(block, shard, bucket) for bucket in sorted(coming, key=ranks.__getitem__)]
        return ReadyPayloads(items, empty=empty, in_place=in_place, interrupted=tools.interrupted)
    # Nothing can overtake any more, so use a few large batches: the shard begins with the first while others are
    # encoded. If all bytes are already in place, one is enough. The shard then handles many workers' pushes one after
    # another; with small batches its threads would keep contending for the same buckets.
    window = tools.credit_bytes or (spec.nbytes if in_place else max(default_credit(spec), spec.nbytes // 4))
    payloads = LivePayloads(
        SendQueue(ranks, [bucket.nbytes for bucket in spec.buckets], window),
        functools.partial(staging.payload, block, shard),
        nbytes=nbytes,
        in_place=in_place,
        interrupted=tools.interrupted,
    )
    for bucket in coming:
        payloads.offer(bucket)
    payloads.close(empty)
    return payloads


class OpenStep:
    """The step that is open for contributions. Used by the computing thread."""

    def __init__(self, methods: WorkerMethods, tools: PushTools, strategy: PushAtEnd) -> None:
        self._methods = methods
        self._tools = tools
        self._staging = tools.staging
        self._strategy = strategy
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
        """Whether the exchange has failed: settle() would raise."""
        return self.sent and self.running is not None and self.running.failed

    @property
    def exchanging(self) -> bool:
        return self.running is not None and self.running.busy

    @property
    def leaves_early(self) -> bool:
        """Whether gradients are expected to leave, or have left, during the backward pass."""
        return self._strategy.early

    @property
    def uses(self) -> dict[int, None] | None:
        """See PushAtEnd.uses; None except in the first step."""
        return self._strategy.uses if self.first else None

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
        share = self.share
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
                ranks = self._strategy.ranks(shard)
                payloads = Whole() if skip else filled_payloads(self._tools, shard, block, ranks, coming)
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
        self._strategy.end_step()
        drop_all([push.payloads for pushes in self.pushes.values() for push in pushes])
        self.pushes, self.target, self.running, self.sent = {}, None, None, False
        self._staging.clear()
