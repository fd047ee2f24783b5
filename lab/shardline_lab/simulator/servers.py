"""Virtual parameter servers: the server half of the job's mode over a storage without threads, memory or network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardline.consistency import Clock, Consistency
from shardline.consistency.intake import Intake
from shardline.consistency.server import NumberedPush, Offer, ShardVote, Staged, StepWanted, Terms
from shardline.consistency.voted import choices as choices_of, votes
from shardline.core.contributions import Contributions, Partial, Present
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import BucketSpec, Slice
from shardline.core.reduce import Block
from shardline.core.spec import DTYPES, TensorKind, TensorSpec
from shardline.storage.bucket import Bucket
from shardline.storage.shard import ByteCount, Hyper, Observers, Storage
from shardline.update import BucketRule
from shardline.waist import Standing

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
    tensors: Sequence[TensorSpec] = (TensorSpec(name="", shape=(1,), dtype="float32"),)
    """Of the plan; the spec's slices name them by number."""
    values: torch.Tensor | None = None
    """The first values; None = only the timing is simulated."""
    make_rule: Callable[[torch.device], BucketRule | None] = lambda device: None


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
        return Partial(None, NOTHING.present)

    def take_of(self, replicas: Sequence[int]) -> Partial:
        return self.take()

    def clear(self) -> None:
        self.counted.clear()
        self.mask = 0


def _counts(bucket: BucketSpec, replicas: int, on_held: Callable[[int], None]) -> Contributions:
    return Counts(bucket, replicas, on_held=on_held)


class VirtualStorage(Storage):
    def __init__(
        self,
        number: int,
        plans: Sequence[BucketPlan],
        replicas: int,
        observers: Observers,
        on_step: Callable[[int], None],
        intake: Intake,
    ) -> None:
        waiting, buckets = ByteCount(), []
        for index, plan in enumerate(plans):
            make = _counts if plan.values is None else intake.contributions
            held = make(plan.spec, replicas, waiting.add)
            areas = torch.zeros(2, plan.spec.elements, dtype=DTYPES[plan.spec.dtype])
            bucket = Bucket(
                number, index, plan.spec, plan.tensors, plan.make_rule, contributions=held, pub=(areas[0], areas[1])
            )
            bucket.initialize(areas[0] if plan.values is None else plan.values)
            buckets.append(bucket)
        super().__init__(number, buckets, observers, waiting)
        self._on_step = on_step

    def closed(self, bucket: Bucket) -> None:
        self._on_step(bucket.step)


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
        self._changed: set[int] = set()
        # Steps and contents that all workers share are served to all alike: it is enough to ask once for all of them.
        self._by_task = mode.clock is Clock.VERSION or any(plan.values is not None for plan in plans)
        self._waiting: list[dict[tuple[int | None, str], list[Reply]]] = [{} for _ in plans]
        """By bucket, wanted step and task."""
        self.completed: list[int] = []
        """Steps that wait for a verdict."""

        def complete(step: int) -> None:
            if self.choices is not None and self.choices.of(step) is None:
                on_choice(self, step)
                return
            self.completed.append(step)
            on_complete()

        observers = Observers(on_publish=self._changed.add, on_complete=complete)
        self.storage = VirtualStorage(number, plans, terms.contributors, observers, on_step, mode.intake)
        self.buckets = self.storage.buckets
        self.half = mode.server_half(self.storage, terms)
        self._votes, self.choices = votes(self.half), choices_of(self.half)

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
        step, task = key
        outcome = self.half.serve(self.buckets[bucket], StepWanted(step=step, task=task))
        if outcome is Outcome.WAITING:
            self._waiting[bucket].setdefault(key, []).extend(replies)
            return
        answer = None
        if outcome is Outcome.SERVED:
            held = self.buckets[bucket]
            plan, values = self.plans[bucket], None
            if plan.values is not None:
                values = held.answer(held.step if step is None else step, task).clone()
            answer = PulledBucket(self.number, bucket, plan.pull_bytes, held.version, values)
        for act, life in replies:
            act(life, answer)

    def contribute(
        self, bucket: int, step: int, block: Block, gradient: Gradient, hyper: Hyper | None = None
    ) -> Decision:
        return self.half.admit(Offer(gradients={bucket: gradient}, step=step, block=block, hyper=hyper))[0]

    def push(self, push: NumberedPush, gradients: Mapping[int, Gradient], hyper: Hyper | None = None) -> None:
        self.half.admit(Offer(gradients=gradients, push=push, hyper=hyper))

    def standing(self, task: str, incarnation: int, replicas: Sequence[int]) -> Standing:
        """The position of a worker that begins."""
        return Standing(
            outcome=Outcome.SERVED,
            reason="",
            timeline=1,
            replicas=self.half.standing(task, incarnation, replicas),
            step_max=max(bucket.step for bucket in self.buckets),
            version=self.storage.version,
            last_seq=self.half.last_push(task, incarnation),
        )

    def members_changed(self, tasks: Sequence[str]) -> None:
        """Only these workers are admitted from now on."""
        self.half.members_changed(tasks, forget=True)
        self._changed.update(range(len(self.buckets)))

    def settle(self) -> None:
        """Answer the pulls that no longer have to wait."""
        while self._changed:
            bucket = self._changed.pop()
            if self._waiting[bucket]:
                waiting, self._waiting[bucket] = self._waiting[bucket], {}
                for key, replies in waiting.items():
                    self._serve(bucket, key, replies)

    # Verdicts

    def vote(self) -> tuple[ShardVote, Staged] | None:
        """The vote on the oldest step that waits for a verdict."""
        assert self._votes is not None, "only steps that wait for a verdict are complete"
        return self._votes.vote(self.completed.pop(0))

    def apply_verdict(self, staged: Staged, *, scale: float, skip: bool) -> None:
        assert self._votes is not None
        self._votes.apply_verdict(staged, scale=scale, skip=skip)
