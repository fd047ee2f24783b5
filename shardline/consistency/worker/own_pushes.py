"""Asynchronous updates: a worker numbers its pushes, and each shard applies them in that order. PROTOCOL 1.5. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from shardline.consistency.numbered_pushes import resume
from shardline.consistency.worker.base import ComputedAt, Stamp, WorkerHalf
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec
from shardline.waist import Standing


class OwnPushes(WorkerHalf):
    """A contribution belongs to (worker, number, shard) and is computed from the latest parameters.

    `step` counts this worker's pushes, whatever their outcomes.
    """

    shares_steps: ClassVar[bool] = False

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job, by_bucket=False)
        self.known = 0, 0, {}

    @property
    def job_step(self) -> int:
        return min(self.base.values(), default=0)

    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        """See WorkerHalf.asks_for: the reply contains the asking worker's own number anyway."""
        return ()

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        found = {shard: standing.last_seq for shard, standing in standings.items()}
        self.lost += sum(max(0, number - found.get(shard, 0)) for shard, number in self.acknowledged.items())
        self.acknowledged = found
        timeline = max((standing.timeline for standing in standings.values()), default=0)
        self.known = timeline, self.lost, self.acknowledged
        return set(owned)

    def awaited(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> Mapping[tuple[int, int], int]:
        return {(0, shard): standing.last_seq + 1 for shard, standing in standings.items()}

    @property
    def exact(self) -> int | None:
        return None

    @property
    def tree_replicas(self) -> int:
        return 1

    def slot(self, replica: int) -> int:
        return 0

    def brings_buffers(self, replica: int) -> bool:
        """See WorkerHalf.brings_buffers: there is no replica 0 to wait for."""
        return True

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return (Block(0, 1),)

    def why_not_early(self, replica: int, owned: Collection[int]) -> str:
        if self.job.consistency.clip_norm > 0.0:
            return "clipping in asynchronous mode needs all of them"
        if self.job.consistency.nan_policy == "skip":
            return "all shards must skip a gradient that is not finite, which the worker decides in asynchronous mode"
        return ""

    def stamp(self, shard: int) -> Stamp:
        return Stamp(seq=self.acknowledged.get(shard, 0) + 1, base=self.base.get(shard, 0))

    @property
    def target(self) -> int | None:
        return None

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        for shard in shards:
            self.acknowledged[shard] = self.acknowledged.get(shard, 0) + 1
        self.base, self.step = dict(base), step
        return dropped

    def went_back(self, mark: ComputedAt) -> bool:
        """See WorkerHalf.went_back: any shard, and others' pushes too, since the loop computes from all of them."""
        held, sent = self.acknowledged, {shard: number + 1 for shard, number in mark.acknowledged.items()}
        lost = any(resume(seq, last_seq=held.get(shard, 0)) is None for shard, seq in sent.items())
        return lost or any(self.base.get(shard, 0) < version for shard, version in mark.base.items())

    def counted(self, mark: ComputedAt) -> bool:
        return all(self.acknowledged.get(shard, 0) > number for shard, number in mark.acknowledged.items())

    def resume(self, mark: ComputedAt) -> None:
        """See WorkerHalf.resume: shards that applied it know its number; its base does not change."""
        self.acknowledged = dict(mark.acknowledged)
        self.known = self.known[0] if self.known else 0, self.lost, self.acknowledged
        self.base = dict(mark.base)

    def accept(self, mark: ComputedAt) -> bool:
        self.step += 1
        return False
