"""Computes stages step by step: passes in the schedule's order, as soon as what they need has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from shardline.core.orders import PassReport
from shardline.core.parcel import Parcel, ParcelKey
from shardline.data import BatchSource, DataSource
from shardline.errors import JobError
from shardline_pipeline.base import Pass, PipelineSchedule
from shardline_pipeline.replica_tensors import StepPart
from shardline_pipeline.stage_work import ActivationChannel, At, StageWork
from shardline_pipeline.staged import StagedModel

Unit = tuple[int, int]
"""(replica, stage)."""


class StageRunner:
    """Computes some stages of some replicas, one step at a time, for schedules with a flush. Used by one thread.

    Each stage of a replica has its passes in the schedule's order; those of several take turns (1F1B-RR). What a pass
    needs never depends on a later one of the schedule, so whatever else a worker has, there is a pass to compute.

    model: on the device to compute on. rest: called before a wait in a step that all stages have begun, so that none
    goes back to the one before; for what can be done now or later.
    """

    def __init__(
        self,
        model: StagedModel,
        job: DataSource,
        source: BatchSource,
        pipeline: PipelineSchedule,
        channel: ActivationChannel,
        *,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._rest = rest
        self._all_began = False
        self._job = job
        self._pipeline = pipeline
        self._channel = channel
        self._work = StageWork(model, job, source, channel, recompute=pipeline.recompute)

    @property
    def samples(self) -> int:
        return self._job.batch_size * self._job.accumulate

    def run(self, step: int, stages: Mapping[int, Sequence[int]]) -> dict[int, StepPart]:
        """Compute these stages, given by replica; returns a part of each replica. Replica 0's buffers are the model's.

        Raises what StageWork.forward() and ActivationChannel.wait() raise; what was computed is dropped then.
        """
        work, tensors = self._work, self._work.tensors
        work.begin(stages)
        work.version, self._all_began = step, False
        for replica, own in sorted(stages.items()):
            tensors.open(replica, own, None if replica == 0 else tensors.in_model())
        try:
            totals = self._compute(step, stages)
            return {
                replica: StepPart(
                    gradients=tensors.take(replica, own),
                    buffers={},
                    loss=totals[replica] / self._job.accumulate if work.last in own else None,
                )
                for replica, own in sorted(stages.items())
            }
        finally:
            tensors.clear()

    def _compute(self, step: int, stages: Mapping[int, Sequence[int]]) -> dict[int, float]:
        work, totals = self._work, dict.fromkeys(stages, 0.0)
        todo = {
            (replica, stage): deque(self._pipeline.passes(stage, work.last + 1, self._job.accumulate))
            for replica, own in stages.items()
            for stage in own
        }
        while todo:
            # The last stages first: what they send back frees memory. Then the replica that has most to do.
            units = sorted(todo, key=lambda unit: (-unit[1], -len(todo[unit]), unit[0]))
            first = {unit: (At(step, *unit, todo[unit][0].microbatch), todo[unit][0]) for unit in units}
            unit = self.choose(first)
            at, one = first[unit]
            todo[unit].popleft()
            self._pass(at, one, totals)
            if not todo[unit]:
                del todo[unit]
        return totals

    def choose(self, first: Mapping[Unit, tuple[At, Pass]]) -> Unit:
        """The first of these units whose next pass has what it needs, once one has. Raises what wait() does."""
        while True:
            for unit, (at, one) in first.items():
                if self._work.ready(at, back=one.back):
                    return unit
            if self._all_began:
                self._rest()
            needed = [self._work.needs(at, back=one.back) for at, one in first.values()]
            self._channel.wait([key for key in needed if key is not None])

    def _pass(self, at: At, one: Pass, totals: dict[int, float]) -> None:
        if one.back:
            self._work.backward(at)
        else:
            totals[at.replica] += self._work.forward(at)
        # What comes to the last stage has gone through all before it; what comes back from it, through all.
        self._all_began = self._all_began or one.back or at.stage == self._work.last


class AtHome:
    """Activations between stages that one process computes."""

    def __init__(self) -> None:
        self._here: dict[ParcelKey, Parcel] = {}
        self.passes: list[PassReport] = []
        """Those that were computed, in order."""

    def send(self, parcel: Parcel) -> None:
        self._here[parcel.key] = parcel

    def here(self, key: ParcelKey) -> bool:
        return key in self._here

    def wait(self, keys: Sequence[ParcelKey]) -> None:
        raise JobError(f"no stage computes {keys[0]}")

    def take(self, key: ParcelKey) -> Parcel:
        return self._here.pop(key)

    def passed(self, report: PassReport) -> None:
        self.passes.append(report)

    def clear(self) -> None:
        self._here.clear()
