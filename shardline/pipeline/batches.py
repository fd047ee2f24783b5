"""Batches for the passes that need one: those of the first stage and of the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardline.data import Batch, BatchSource, DataSource, to_device
from shardline.errors import calling

Place = tuple[int, int, int]
"""(step, replica, microbatch)."""


class Batches:
    """Reads batches in the order in which passes ask for them.

    Replicas take turns, but data that is read in one direction can't: what is in between is read and kept then.
    """

    def __init__(self, job: DataSource, source: BatchSource, last: int, device: torch.device) -> None:
        """last: the last stage."""
        self._count = job.accumulate
        self._source = source
        self._last = last
        self._device = device
        self._stages: Mapping[int, Sequence[int]] = {}
        self._kept: dict[Place, Batch] = {}
        self._next: Place | None = None
        """Of the batches that this worker's passes need, in the order of the data: the next one to read."""

    def begin(self, stages: Mapping[int, Sequence[int]]) -> None:
        """Forget everything. stages: of this worker, by replica."""
        self._stages = {replica: own for replica, own in stages.items() if {0, self._last} & set(own)}
        self._kept.clear()
        self._next = None

    def take(self, step: int, replica: int, stage: int, microbatch: int) -> Batch:
        """The batch for a pass, on the device. If both the first and the last stage are here, it is kept for that."""
        place = (step, replica, microbatch)
        found = self._kept.pop(place) if place in self._kept else self._read(place)
        if stage == 0 < self._last and self._last in self._stages[replica]:
            self._kept[place] = found
        return found

    def _read(self, place: Place) -> Batch:
        if self._source.ordered and len(self._stages) > 1:
            at = (place[0], min(self._stages), 0) if self._next is None else self._next
            while at < place:
                self._kept[at] = self._load(at)
                at = self._after(at)
            self._next = self._after(place)
        return self._load(place)

    def _after(self, place: Place) -> Place:
        step, replica, microbatch = place
        if microbatch + 1 < self._count:
            return step, replica, microbatch + 1
        own = sorted(self._stages)
        number = own.index(replica) + 1
        return (step, own[number], 0) if number < len(own) else (step + 1, own[0], 0)

    def _load(self, place: Place) -> Batch:
        batch = self._source.batch(*place)
        with calling(f"moving a batch to {self._device}"):
            return to_device(batch, self._device)
