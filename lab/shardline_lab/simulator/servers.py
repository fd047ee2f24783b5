"""Virtual parameter servers: the server half of the job's mode over a storage without threads, memory or network."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardline.consistency import Consistency
from shardline.consistency.server import (
    BucketView,
    Hyper,
    Observers,
    ShardUpdate,
    ShardVote,
    Staged,
    StepWanted,
    Tally,
    Terms,
)
from shardline.core.contributions import Contributions, Partial, Present, scaled
from shardline.core.gradients import Gradient
from shardline.core.outcome import Outcome
from shardline.core.plan import BucketSpec, Slice
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.records import AppliedPush
from shardline.core.reduce import Block
from shardline.core.spec import TensorKind
from shardline.update import BucketRule, Need
from shardline.waist import Standing

CPU = torch.device("cpu")
NOTHING = Gradient(None, (False,))
"""A gradient in a simulation of the timing alone."""
TINY = BucketSpec(
    dtype="float32",
    kind=TensorKind.PARAM,
    elements=64,
    slices=(Slice(tensor=0, first_row=0, rows=1, offset=0, elements=1),),
)
"""A bucket in a simulation of the timing alone."""


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """A bucket of a virtual server: the unit of transfer."""

    push_bytes: Sequence[float]
    """Of one contribution, as its codec writes it: to step t, the number t modulo their count."""
    pull_bytes: Sequence[float]
    """Of what step t has changed; see push_bytes."""
    spec: BucketSpec = TINY
    names: tuple[str, ...] = ("",)
    group: int = 0
    values: torch.Tensor | None = None
    """The first values; None = only the timing is simulated."""
    make_rule: Callable[[], BucketRule] | None = None


class Counts(Contributions):
    """Who has contributed, without gradients to add up: a simulation of the timing alone spends no time on sums."""

    def add(
        self,
        block: Block,
        values: torch.Tensor | None,
        present: Present,
        fingerprint: int,
        *,
        borrowed: bool = False,
        bound: float = math.inf,
    ) -> None:
        self.counted.update(range(block.first, block.end))
        self.mask |= ((1 << block.count) - 1) << block.first

    def take(self) -> Partial:
        """See Contributions. Nothing."""
        return Partial(None, NOTHING.present)

    def take_of(self, replicas: Sequence[int]) -> Partial:
        """See Contributions. Nothing."""
        return self.take()

    def clear(self) -> None:
        self.counted.clear()
        self.mask = 0


class VirtualBucket:
    """See shardline.consistency.server.BucketView. Values are never overwritten, so a pull needs no copy."""

    def __init__(
        self, number: int, plan: BucketPlan, replicas: int, published: Callable[[int], None], *, in_tree: bool
    ) -> None:
        """published(step): called with each new step. in_tree: see Contributions."""
        self.lock = threading.Lock()
        self.number = number
        self.spec = plan.spec
        self.names = plan.names
        self.device = CPU
        self.group = plan.group
        self.step = self.version = self.oldest = 0
        self.initialized = True
        self.contributions = (Counts if plan.values is None else Contributions)(plan.spec, replicas, in_tree=in_tree)
        self.hyper: Mapping[str, float] | None = None
        self.pending: object | None = None
        self.counted: list[int] = []
        self.values, self._before = plan.values, plan.values
        self._rule = plan.make_rule() if plan.make_rule is not None else None
        self._published = published

    def apply(self, total: Partial, *, scale: float = 1.0, skip: bool = False, context: PushContext = TOGETHER) -> None:
        self._before = self.values
        if not skip and self.values is not None and total.values is not None and any(total.present):
            self.values = self._updated(self.values, total, scale, context)
        self.version += not skip
        self.step += 1
        self.hyper = None
        self.contributions.clear()
        self._published(self.step)

    def _updated(self, values: torch.Tensor, total: Partial, scale: float, context: PushContext) -> torch.Tensor:
        new = values.clone()
        assert total.values is not None
        if self._rule is not None:
            gradient = scaled(total, scale).values
            assert gradient is not None
            self._rule.apply(new, gradient, clock=self.step, present=total.present, hyper=self.hyper, context=context)
        elif self.spec.kind is TensorKind.BUFFER:
            for piece, present in zip(self.spec.slices, total.present, strict=True):
                if present:
                    new[piece.offset : piece.end] = total.values[piece.offset : piece.end]
        return new

    def answer(self, step: int | None, task: str) -> torch.Tensor | None:
        """The values that a pull gets; None if only the timing is simulated."""
        if self.values is None or (step is not None and step < self.step):
            return self._before
        if self._rule is None:
            return self.values
        found = self._rule.answer(self.values, task)
        if Need.PULLS in self._rule.rule.needs:
            self._rule.sent(task, found)
        return found

    def members_changed(self, tasks: Collection[str]) -> None:
        """Drop what the rule keeps for others."""
        if self._rule is not None and self._rule.workers:
            self._rule.members_changed(tasks)


class VirtualStorage:
    def __init__(self, number: int, buckets: Sequence[VirtualBucket], observers: Observers) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.order = threading.Lock()
        self.tally = Tally()
        self.observers = observers
        self.stop_step: int | None = None
        self._buckets = buckets

    @property
    def buckets(self) -> Sequence[BucketView]:
        return self._buckets

    @property
    def version(self) -> int:
        return min(bucket.version for bucket in self._buckets)

    def hold(self, difference: int) -> None:
        """See Storage. Memory is not simulated."""

    def check_hyper(self, bucket: BucketView, hyper: Hyper | None) -> None:
        """See Storage. Workers of a simulation send none."""

    def apply_bucket(self, bucket: BucketView, total: Partial, context: PushContext = TOGETHER) -> None:
        bucket.apply(total, context=context)

    def apply_together(self, update: ShardUpdate) -> None:
        with self.order:
            verdict = update.verdict
            for bucket in self._buckets:
                with bucket.lock:
                    total = update.total_of(bucket)
                    if total is None:
                        continue
                    bucket.apply(total, scale=verdict.scale, skip=verdict.skip)
                    update.applied(bucket)
                self.observers.on_publish(bucket.number)
            update.closed()

    def record(
        self, parts: Sequence[tuple[BucketView, Partial]], *, scale: float = 1.0, push: AppliedPush | None = None
    ) -> int | None:
        """See Storage. There is no standby."""
        return None

    def apply_now(
        self, bucket: BucketView, total: Partial, *, scale: float, context: PushContext, record: int | None
    ) -> None:
        with bucket.lock:
            bucket.apply(total, scale=scale, context=context)


class PulledBucket(NamedTuple):
    server: int
    bucket: int
    sizes: Sequence[float]
    version: int
    values: torch.Tensor | None


Reply = tuple[Callable[[int, PulledBucket | None], None], int]
"""Called with the number beside it and the answer to a pull: None if the values are gone, so that the worker has to
find its position again."""


class VirtualServer:
    """One server: who waits for what, and the mode's decisions."""

    def __init__(
        self,
        number: int,
        plans: Sequence[BucketPlan],
        mode: Consistency,
        terms: Terms,
        *,
        on_step: Callable[[int], None],
        on_complete: Callable[[], None],
        on_choice: Callable[[VirtualServer, int], None],
    ) -> None:
        """on_step(step): called for each bucket that is published. on_complete: when a step needs a verdict of all.

        on_choice(server, step): when this server has to ask the lead whose gradients make a step.
        """
        self.number = number
        self.plans = plans
        self.buckets = [
            VirtualBucket(index, plan, terms.contributors, on_step, in_tree=mode.sums_in_tree)
            for index, plan in enumerate(plans)
        ]
        self._changed: set[int] = set()
        # Other modes and contents serve all workers alike, so it is enough to ask once for all of them.
        self._by_task = mode.holds_back or any(plan.values is not None for plan in plans)
        self._waiting: list[dict[tuple[int | None, str], list[Reply]]] = [{} for _ in plans]
        """By bucket, wanted step and task."""
        self.completed: list[int] = []
        """Steps that wait for a verdict."""

        def complete(step: int) -> None:
            if self.half.choices is not None and self.half.choices.of(step) is None:
                on_choice(self, step)
                return
            self.completed.append(step)
            on_complete()

        observers = Observers(on_publish=self._changed.add, on_complete=complete)
        self.storage = VirtualStorage(number, self.buckets, observers)
        self.half = half = mode.server_half(self.storage, terms)
        self.contribute, self.push = half.contribute, half.push

    # What workers do

    def pull(self, bucket: int, step: int | None, task: str, reply: Reply) -> None:
        """Answer now or as soon as the mode allows it. step: None = the latest values."""
        key = (step, task if self._by_task else "")
        waiting = self._waiting[bucket].get(key)
        if waiting is not None:
            # It would have to wait too: settle() looks again when anything has changed.
            waiting.append(reply)
        else:
            self._serve(bucket, key, [reply])

    def _serve(self, bucket: int, key: tuple[int | None, str], replies: list[Reply]) -> None:
        """Answer pulls that ask for the same, or have them wait."""
        step, task = key
        outcome = self.half.serve(self.buckets[bucket], StepWanted(step=step, task=task))
        if outcome is Outcome.WAITING:
            self._waiting[bucket].setdefault(key, []).extend(replies)
            return
        answer = None
        if outcome is Outcome.SERVED:
            held = self.buckets[bucket]
            sizes = self.plans[bucket].pull_bytes
            answer = PulledBucket(self.number, bucket, sizes, held.version, held.answer(step, task))
        for act, life in replies:
            act(life, answer)

    def standing(self, task: str, incarnation: int, replicas: Sequence[int]) -> Standing:
        """The position of a worker that begins; see ServerHalf.asked()."""
        self.half.asked(task, incarnation, begins=bool(replicas))
        return Standing(
            outcome=Outcome.SERVED,
            reason="",
            timeline=1,
            replicas={replica: self.half.progress(replica) for replica in replicas},
            step_max=max(bucket.step for bucket in self.buckets),
            version=self.storage.version,
            last_seq=self.half.last_push(task, incarnation),
        )

    def members_changed(self, tasks: Sequence[str]) -> None:
        """Only these workers are admitted from now on."""
        self.half.members_changed(tasks)
        for bucket in self.buckets:
            bucket.members_changed(tasks)
            self._changed.add(bucket.number)

    def settle(self) -> None:
        """PulledBucket the pulls that no longer have to wait."""
        while self._changed:
            bucket = self._changed.pop()
            if self._waiting[bucket]:
                waiting, self._waiting[bucket] = self._waiting[bucket], {}
                for key, replies in waiting.items():
                    self._serve(bucket, key, replies)

    # Verdicts

    def vote(self) -> tuple[ShardVote, Staged] | None:
        """The vote on the oldest step that waits for a verdict; see ServerHalf.vote()."""
        return self.half.vote(self.completed.pop(0))
