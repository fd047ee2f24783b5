"""Synchronous steps: every replica contributes once to each numbered step. PROTOCOL 1.4. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from shardline.consistency.worker.base import ComputedAt, Stamp, WorkerHalf
from shardline.core.reduce import Block, cover
from shardline.waist import Standing


class SharedSteps(WorkerHalf):
    """A contribution belongs to (step, replica): resending is harmless, and only that step is waited for."""

    shares_steps: ClassVar[bool] = True
    presums: ClassVar[bool] = True

    @property
    def job_step(self) -> int:
        return self.step

    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        return owned

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        steps = self._steps(standings, owned)
        self.step = min(steps.values())
        return {replica for replica, step in steps.items() if step == self.step}

    @staticmethod
    def _steps(standings: Mapping[int, Standing], owned: Sequence[int]) -> dict[int, int]:
        return {replica: min(found.replicas[replica] for found in standings.values()) for replica in owned}

    def awaited(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> Mapping[tuple[int, int], int]:
        """See WorkerHalf.awaited: a step that some shard lacks is resent to all of them."""
        steps = self._steps(standings, owned)
        return {(replica, shard): step for replica, step in steps.items() for shard in standings}

    @property
    def exact(self) -> int | None:
        return self.step

    @property
    def tree_replicas(self) -> int:
        return self.job.replicas

    def slot(self, replica: int) -> int:
        return replica

    def brings_buffers(self, replica: int) -> bool:
        return replica == 0

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        return cover(owned, self.job.replicas)

    def why_not_early(self, replica: int, owned: Collection[int]) -> str:
        if len(self.blocks(owned)) > 1 or max(owned) != replica:
            return "the replicas of this worker need more than one push"
        return ""

    def stamp(self, shard: int) -> Stamp:
        return Stamp(step=self.step)

    @property
    def target(self) -> int | None:
        return self.step + 1

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        before, self.base, self.step = self.base, dict(base), step
        return self._stood_still(before)

    def _stood_still(self, base: Mapping[int, int]) -> bool:
        """Whether the step since these versions made no new version of any shard: all have skipped it."""
        return self.job.consistency.nan_policy == "skip" and self.base == base

    def went_back(self, mark: ComputedAt) -> bool:
        return self.step < mark.step

    def counted(self, mark: ComputedAt) -> bool:
        return self.step > mark.step

    def resume(self, mark: ComputedAt) -> None:
        """See WorkerHalf.resume: the step identifies it."""

    def accept(self, mark: ComputedAt) -> bool:
        return self._stood_still(mark.base)
