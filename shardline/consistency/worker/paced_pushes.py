"""Pushes that are numbered by the worker's clock too, so that all shards count the same. PROTOCOL 1.5. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shardline.consistency.worker.base import ComputedAt, Stamp
from shardline.consistency.worker.own_pushes import OwnPushes
from shardline.core.exchange import Standing
from shardline.core.spec import JobSpec


class PacedPushes(OwnPushes):
    """Own pushes of a worker that must not get too far ahead of others."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job)
        self._clock = 0
        self._timeline = 0

    @property
    def clock(self) -> int:
        """See WorkerHalf.clock. It counts from where the slowest worker was when this one began."""
        return self._clock

    def asks_for(self, owned: Sequence[int]) -> Sequence[int]:
        """See WorkerHalf.asks_for: naming a replica says that this worker begins to compute."""
        return (0,)

    def located(self, standings: Mapping[int, Standing], owned: Sequence[int]) -> set[int]:
        """See WorkerHalf.located. In a new timeline all workers begin anew; in the same one, none goes back."""
        timeline = max(standing.timeline for standing in standings.values())
        if timeline != self._timeline:
            self._clock = 0
        self._timeline = timeline
        self.woken(standings)
        return super().located(standings, owned)

    def woken(self, standings: Mapping[int, Standing]) -> None:
        """See WorkerHalf.woken. The servers let it begin where the slowest worker is."""
        self._clock = max(self._clock, *(standing.replicas[0] for standing in standings.values()))

    def stamp(self, shard: int) -> Stamp:
        return replace(super().stamp(shard), clock=self._clock + 1)

    def closed(self, step: int, shards: Collection[int], base: Mapping[int, int], *, dropped: bool) -> bool:
        self._clock += 1
        return super().closed(step, shards, base, dropped=dropped)

    def accept(self, mark: ComputedAt) -> bool:
        self._clock += 1
        return super().accept(mark)
