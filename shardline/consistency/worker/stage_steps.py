"""Steps of stages whose replicas don't wait for each other: each replica counts its own. PROTOCOL 1.5. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from shardline.consistency.worker.shared_steps import SharedSteps
from shardline.core.exchange import Standing
from shardline.core.reduce import Block
from shardline.core.spec import JobSpec


class StageSteps(SharedSteps):
    """A contribution belongs to (step, replica, bucket), and is computed from the latest parameters of its stage.

    `step` counts the worker's own steps, which are those of all its replicas.
    """

    steps_with_all: ClassVar[bool] = False

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job)
        self._timeline = self._open = 0
        self._updates = self._counted = 0

    @property
    def job_step(self) -> int:
        """The fewest updates that the stages of this worker have had, as far as it knows: its own, or more.

        Its own, while other stages may need again what this worker has computed before the timeline began.
        """
        return max(self.step, self._updates) if self.step >= self._counted else self.step

    @property
    def reported_step(self) -> int:
        """See WorkerHalf.reported_step: checkpoints, and so rollbacks, count updates."""
        return self.job_step

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        """See WorkerHalf.located.

        In a new timeline those begin together that are bound to each other by workers which have stages of several: at
        the first step that some stage of one of them lacks. Later the worker goes on with what it has not closed.
        """
        timeline = max(standing.timeline for standing in standings.values())
        if timeline != self._timeline:
            self._open = min(one.replicas[replica] for one in standings.values() for replica in owned)
            self._counted = max(one.last_seq for one in standings.values())
            # The job may have gone back behind what it had.
            self._updates = 0
        self._timeline = timeline
        self.step = self._open
        return set(owned)

    @property
    def exact(self) -> int | None:
        return None

    @property
    def target(self) -> int | None:
        return None

    @property
    def ahead(self) -> int | None:
        return self._open + 1

    def blocks(self, owned: Collection[int]) -> Sequence[Block]:
        """See WorkerHalf.blocks: each replica makes an update."""
        return [Block(replica, 1) for replica in sorted(owned)]

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        self._open = step
        self._updates = min(base[shard] for shard in shards)
        return super().closed(step, shards, base, dropped=dropped)
