"""Computes stages of a replica, step by step: passes in the schedule's order, as soon as what they need has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.core.orders import PassReport
from shardline.data import BatchSource, DataSource
from shardline.errors import JobError
from shardline.pipeline.base import PipelineSchedule
from shardline.pipeline.parcel import Parcel, ParcelKey
from shardline.pipeline.stage_work import At, Layers, Parcels, StageWork


@dataclass(frozen=True, kw_only=True)
class Place:
    """What is computed: one replica's part of one step."""

    step: int
    replica: int


class StageRunner:
    """Computes some stages of a replica, one step at a time, for schedules with a flush. Used by one thread.

    model: on the device to compute on. Gradients are left in the parameters' .grad, the mean over the microbatches.
    """

    def __init__(
        self, model: Layers, job: DataSource, source: BatchSource, pipeline: PipelineSchedule, parcels: Parcels
    ) -> None:
        self._job = job
        self._pipeline = pipeline
        self._parcels = parcels
        self._work = StageWork(model, job, source, parcels)

    @property
    def samples(self) -> int:
        """Samples of a replica's part of a step."""
        return self._job.batch_size * self._job.accumulate

    def run(self, place: Place, stages: Sequence[int]) -> float | None:
        """Compute these stages; returns the mean loss if the last one is among them.

        Raises what StageWork.forward() and Parcels.wait() raise.
        """
        work, count, total = self._work, self._job.accumulate, 0.0
        work.clear()
        work.version = place.step
        both = {0, work.last} <= set(stages)
        todo = {
            stage: deque(self._pipeline.passes(stage, work.last + 1, count)) for stage in sorted(stages, reverse=True)
        }
        while todo:
            # The last stages first: what they send back frees memory.
            first = {stage: (At(place.step, place.replica, stage, p[0].microbatch), p[0]) for stage, p in todo.items()}
            ready = next((stage for stage, (at, one) in first.items() if work.ready(at, back=one.back)), None)
            if ready is None:
                needed = [work.needs(at, back=one.back) for at, one in first.values()]
                self._parcels.wait([key for key in needed if key is not None])
                continue
            at, one = first[ready]
            todo[ready].popleft()
            if not todo[ready]:
                del todo[ready]
            if one.back:
                work.backward(at)
            else:
                total += work.forward(at, keep_batch=both)
        return total / count if work.last in stages else None


class AtHome:
    """Parcels between stages that one process computes."""

    def __init__(self) -> None:
        self._here: dict[ParcelKey, Parcel] = {}
        self.passes: list[PassReport] = []
        """Those that were computed, in order."""

    def send(self, parcel: Parcel) -> None:
        """See Parcels.send."""
        self._here[parcel.key] = parcel

    def here(self, key: ParcelKey) -> bool:
        """See Parcels.here."""
        return key in self._here

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        """See Parcels.wait. Raises JobError: nobody else can send them."""
        raise JobError(f"no stage computes {keys[0]}")

    def take(self, key: ParcelKey) -> Parcel:
        """See Parcels.take."""
        return self._here.pop(key)

    def passed(self, report: PassReport) -> None:
        """See Parcels.passed."""
        self.passes.append(report)

    def clear(self) -> None:
        """Forget all parcels."""
        self._here.clear()
