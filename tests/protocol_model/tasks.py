"""What tasks of the synchronous model hold: buckets and shards of a ps, a worker, a push under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shardline.core.reduce import Block
from tests.protocol_model.numbers import State, Verdict


class Bucket:
    """theta_step, theta_{step-1} where there are two published buffers, and what the open step has gathered."""

    def __init__(self, number: int, state: State, step: int, published: int) -> None:
        self.number = number
        self.state = state
        self.step = step
        self.oldest = step
        self.pub: list[float | None] = [None] * published
        self.pub[step % published] = state.theta
        self.held: dict[Block, float] = {}
        self.counted: set[int] = set()

    def read(self, want: int) -> float | None:
        return self.pub[want % len(self.pub)]

    def publish(self, state: State) -> None:
        self.state = state
        self.step += 1
        self.pub[self.step % len(self.pub)] = state.theta
        self.drop()

    def drop(self) -> None:
        self.held.clear()
        self.counted.clear()


@dataclass
class Cut:
    """A shard's one place for a copy."""

    step: int
    copies: dict[int, State] = field(default_factory=dict)


class Shard:
    """One primary. status: "active", "prepared" (admits nothing) or "blank" (a new process)."""

    def __init__(self, number: int, buckets: list[Bucket]) -> None:
        self.number = number
        self.buckets = buckets
        self.reset(1)
        self.status = "active"
        self.lost = False
        """Dead, and the chief hasn't begun to repair it."""

    def reset(self, timeline: int) -> None:
        """Configure for another timeline: admit nothing, drop contributions, votes and copies."""
        self.timeline = timeline
        self.status = "prepared"
        self.verdict: tuple[int, Verdict] | None = None
        self.votes: dict[int, dict[int, dict[int, float]]] = {}
        """At the lead only: step -> shard -> mean gradient by bucket."""
        self.decided: tuple[int, Verdict] | None = None
        self.cut: Cut | None = None
        self.skipped: set[int] = set()
        self.released = 0
        for bucket in self.buckets:
            bucket.drop()

    def die(self) -> None:
        self.reset(0)
        self.status = "blank"
        self.lost = True
        self.buckets = []

    def keep_copy(self, bucket: Bucket) -> None:
        """The bucket has just reached a step of the cadence. All buckets of a shard copy it, or none does."""
        step = bucket.step
        # Released before it was reached: another shard had no room for it, so nobody will fetch it.
        if step <= self.released or step in self.skipped:
            return
        if self.cut is None:
            self.cut = Cut(step)
        if self.cut.step == step:
            self.cut.copies[bucket.number] = bucket.state
        else:
            self.skipped.add(step)

    def release(self, step: int) -> None:
        self.released = max(self.released, step)
        if self.cut is not None and self.cut.step <= step:
            self.cut = None

    @property
    def has_cut(self) -> bool:
        return self.cut is not None and len(self.cut.copies) == len(self.buckets)


class Worker:
    """One incarnation. It pulls theta_want, and its outbox holds the pushes of step want - 1 that it can't forget yet.

    phase: "join" (learn the timeline), "ask" (Progress), "work".
    """

    def __init__(self, incarnation: int, replicas: Iterable[int]) -> None:
        self.incarnation = incarnation
        self.replicas = sorted(replicas)
        self.timeline = 0
        self.epoch = 0
        self.gradients: dict[int, list[float]] = {}
        """By replica: of step want - 1, one number per bucket."""
        self.restart()

    def restart(self) -> None:
        """Back to Progress, after a new assignment, a new timeline, or parameters that are gone."""
        self.epoch += 1
        self.phase = "join"
        self.answers: dict[int, int] = {}
        self.outbox: dict[tuple[int, Block], float] = {}
        self.to_pull: list[int] = []

    def begin(self, step: int, buckets: int) -> None:
        self.phase = "work"
        self.first = True
        self.await_step(step, buckets)

    def await_step(self, step: int, buckets: int) -> None:
        self.want = step
        self.params: list[float | None] = [None] * buckets
        self.to_pull = list(range(buckets))

    def past(self, bucket: int) -> None:
        """The bucket has applied the step, so its pushes need no repetition."""
        for key in [key for key in self.outbox if key[0] == bucket]:
            del self.outbox[key]


class Message(NamedTuple):
    """A push under way. received: it has passed the admission check, so no fence stops it any more."""

    worker: Worker
    epoch: int
    timeline: int
    bucket: int
    block: Block
    step: int
    value: float
    received: bool


@dataclass
class Counts:
    """What happened in a schedule, so that tests can tell that something did."""

    schedules: int = 0
    actions: int = 0
    kills: int = 0
    duplicates: int = 0
    splits: int = 0
    fenced: int = 0
    overtaken: int = 0
    wrong_timeline: int = 0
    rollbacks: int = 0
    cuts: int = 0
    discarded_cuts: int = 0
    repeated_cuts: int = 0
    skipped_steps: int = 0
    records: int = 0
    copies: int = 0
    promotions: int = 0

    def add(self, other: Counts) -> None:
        for item in dataclasses.fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
