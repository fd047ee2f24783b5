"""Computes stages that can't begin a step again: a stream of passes over all steps, with versions of the parameters.

Without a flush, stages are at different steps. Where replicas don't wait for each other, nobody else has the parameters
that a step was begun with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardline.core.parcel import ParcelKey
from shardline.data import BatchSource, DataSource
from shardline.errors import InternalError
from shardline_pipeline.base import PipelineSchedule, StageLayout
from shardline_pipeline.replica_tensors import StepPart, Values
from shardline_pipeline.schedules.gaps import Gaps, GradientRun
from shardline_pipeline.stage_work import ActivationChannel, At, StageWork
from shardline_pipeline.staged import StagedModel


class StageCounts:
    """What stages do, beside what their schedule says: nothing depends on how fast anything is.

    With one microbatch per step, and one worker for each stage, stage s of n under weight stashing computes step t with
    version max(0, t - (n - 1 - s)), keeps n - s versions, and holds n - s microbatches (Narayanan et al.: PipeDream,
    2019, section 3.3); other schedules, layouts, and more microbatches: see their version() and StageLayout.ahead().
    """

    def __init__(self, schedule: PipelineSchedule, layout: StageLayout, first: int) -> None:
        """first: the step at which the pipeline is empty."""
        self._schedule = schedule
        self._layout = layout
        self._first = first
        self._newest: dict[int, int] = {}
        """By stage."""

    def arrived(self, stage: int, version: int, kept: Collection[int]) -> None:
        """A stage has got a version, and keeps these. Raises InternalError if it should have others.

        Those from the first pass of the step on, which is the next one to go back: t - version(first microbatch of t)
        + 1 when version t arrives.
        """
        after = self._newest.get(stage, self._first - 1) + 1
        oldest = self._version(self._layout.first(version), stage)
        expected = {version} if self._schedule.keeps_one else set(range(oldest, version + 1))
        if version != after or set(kept) != expected:
            raise InternalError(
                f"stage {stage} has got version {version} and keeps {sorted(kept)}, where pipeline {self._named} and "
                f"{self._layout.microbatches} microbatches, empty at step {self._first}, has version {after} next and "
                f"keeps {sorted(expected)}"
            )
        self._newest[stage] = version

    def passed(self, stage: int, number: int, version: int, held: int, together: int, *, back: bool) -> None:
        """A stage has computed a pass with a version. Raises InternalError.

        number: see StageLayout. held: microbatches of the pass's replica that the stage holds; together: of all those
        that the layout's same worker has.
        """
        layout = self._layout
        expected, most, all_ = self._version(number, stage, back=back), layout.held(stage), layout.ahead(stage) + 1
        if self._schedule.flushes:
            most = self._schedule.held(stage, layout.stages, layout.microbatches)
            all_ = most * layout.replicas // layout.workers[stage]
        if version != expected or version > self._newest.get(stage, -1) or held > most or together > all_:
            microbatch, replica = divmod(number, layout.replicas)
            raise InternalError(
                f"stage {stage} has computed microbatch {microbatch % layout.microbatches} of step "
                f"{layout.step(number)} {'backward' if back else 'forward'}, of replica {replica}, with version "
                f"{version} of {self._newest.get(stage)}, holding {held} microbatches, {together} with other replicas, "
                f"where pipeline {self._named} has version {expected} and holds {most} and {all_} at most"
            )

    @property
    def _named(self) -> str:
        workers = ", ".join(map(str, self._layout.workers))
        return f"{self._schedule} of stages with {workers} workers for {self._layout.replicas} replicas"

    def _version(self, number: int, stage: int, *, back: bool = False) -> int:
        version = self._schedule.back_version if back else self._schedule.version
        return version(number, stage, self._layout, first=self._first)


class StageExchange(ActivationChannel, Protocol):
    """Activations, and the exchange of parameters with the servers."""

    def comes_first(self, keys: Sequence[ParcelKey]) -> bool:
        """Wait until one of these has come; False if settle() is to be called first, since it need not wait (long)."""

    def settle(self) -> None:
        """Wait until the parameters of the open step are in the tensors that pulls fill. Raises if they don't come."""

    def staleness(self, stage: int, steps: int) -> None:
        """Note how many updates the parameters of a finished step had missed at most."""


@dataclass(frozen=True, kw_only=True)
class ParameterSource:
    """Where a worker's versions of the parameters come from."""

    pulled: Callable[[], Values]
    """The tensors that pulls fill, by name."""
    predict: Callable[[int, int], Values] | None = None
    """(stage, how many): its parameters so many updates after those that have arrived last; for pipelines that
    predict."""
    gaps: Callable[[], Gaps] | None = None
    """What measures gaps from where the pipeline is empty; for pipelines that divide gradients by them."""


@dataclass
class _Run:
    """Backward passes that follow each other and have the same version."""

    version: int
    passes: int = 0
    gradients: Values = field(default_factory=dict)
    """When the next run has begun."""


@dataclass
class _Unit:
    """One stage of one replica. Microbatches are counted from the job's first one."""

    replica: int
    stage: int
    forward: int
    """The next forward pass."""
    backward: int
    losses: dict[int, float] = field(default_factory=dict)
    """Of the last stage: sum over the microbatches, by step."""
    buffers: dict[int, Values] = field(default_factory=dict)
    """Of replica 0: as the last forward pass of a step has left them, by step."""
    runs: list[_Run] = field(default_factory=list)
    """Backward passes of the open step, if gaps count."""


class StreamRunner:
    """Computes some stages. Used by one thread.

    Without a flush, forward passes of the next steps are computed beside one step: every step begins in the middle. The
    model's parameters are pointed at the version that a pass needs. Stages and replicas take turns, whichever has what
    it needs. A schedule that keeps one version has it in the same memory all the time, so that what autograd has kept
    of it is always the newest.

    steps: of the job.
    """

    def __init__(
        self,
        model: StagedModel,
        job: DataSource,
        source: BatchSource,
        pipeline: PipelineSchedule,
        exchange: StageExchange,
        parameters: ParameterSource,
        *,
        steps: int,
    ) -> None:
        self._job = job
        self._pipeline = pipeline
        self._exchange = exchange
        self._pulled = parameters.pulled
        self._steps = steps
        self._predict = parameters.predict if pipeline.predict else None
        self._make_gaps = parameters.gaps if pipeline.gap_aware else None
        self._gaps: Gaps | None = None
        self._work = StageWork(
            model, job, source, exchange, recompute=pipeline.recompute, overwrites=pipeline.keeps_one
        )
        self._layout = StageLayout.of(model.hosts, model.num_stages, job.contributors, job.accumulate)
        self._step = self._first = 0
        self._history: tuple[int, Mapping[int, Sequence[int]]] = (-1, {})
        """Timeline, and stages by replica."""
        self._versions: dict[int, dict[int, Values]] = {}
        """Parameters of this worker's stages, by stage and version."""
        self._counts = StageCounts(pipeline, self._layout, 0)
        self._predicted: dict[tuple[int, int, int], Values] = {}
        """By version, stage, and how many updates later."""
        self._units: list[_Unit] = []
        self._parts: dict[int, StepPart] = {}
        """Of the open step, by replica."""

    @property
    def samples(self) -> int:
        return self._job.batch_size * self._job.accumulate

    def begin(self, step: int, timeline: int, stages: Mapping[int, Sequence[int]]) -> None:
        """Compute this step next. stages: of this worker, by replica.

        The pipeline is empty where the job's history, or this worker's part of it, is another one than before.
        """
        if (timeline, stages) != self._history or step not in (self._step, self._step + 1):
            self._history = (timeline, stages)
            self._first = step
            self._work.begin(stages)
            self._work.tensors.clear()
            self._versions.clear()
            self._counts = StageCounts(self._pipeline, self._layout, step)
            self._predicted.clear()
            self._gaps = None if self._make_gaps is None else self._make_gaps()
            self._units.clear()
            self._parts.clear()
        elif step != self._step:
            self._parts.clear()
        self._step = step

    def run(self) -> dict[int, StepPart]:
        """Compute the open step, and what can be computed of the next ones; returns a part of each replica.

        Called again for the same step, it goes on. Raises what StageWork.forward() and the StageExchange raise.
        """
        if not self._parts:
            self._compute()
            self._parts = {replica: self._part(replica) for replica in sorted(self._history[1])}
            # Nothing needs older versions than the first pass of the next step.
            oldest = {stage: self._version(self._layout.first(self._step + 1), stage) for stage in self._own}
            if not self._pipeline.keeps_one:
                for stage, kept in self._versions.items():
                    self._versions[stage] = {version: one for version, one in kept.items() if version >= oldest[stage]}
            self._predicted = {key: one for key, one in self._predicted.items() if key[0] >= oldest[key[1]]}
        return self._parts

    def _compute(self) -> None:
        if not self._units:
            self._open()
        end = (self._step + 1) * self._job.accumulate
        while any(unit.backward < end for unit in self._units):
            if self._advance():
                continue
            keys = [key for _, at, back, _ in self._next() if (key := self._work.needs(at, back=back))]
            if self._has_come:
                self._exchange.wait(keys)
            elif not self._exchange.comes_first(keys):
                self._arrive()
        self._arrive()
        for stage in self._own:
            self._exchange.staleness(stage, self._step - self._version(self._layout.first(self._step), stage))

    def _part(self, replica: int) -> StepPart:
        loss: float | None = None
        buffers: dict[str, torch.Tensor] = {}
        for unit in self._units:
            if unit.replica == replica:
                buffers.update(unit.buffers.pop(self._step, {}))
                if unit.stage == self._work.last:
                    loss = unit.losses.pop(self._step) / self._job.accumulate
        gradients = self._work.tensors.take(replica, self._history[1][replica])
        for unit in self._units:
            if self._gaps is not None and unit.replica == replica:
                gradients.update(self._mitigated(unit, gradients))
        return StepPart(gradients=gradients, buffers=buffers, loss=loss)

    @property
    def _own(self) -> set[int]:
        return {stage for stages in self._history[1].values() for stage in stages}

    def _open(self) -> None:
        self._arrive()
        begin = self._first * self._job.accumulate
        for replica, stages in sorted(self._history[1].items()):
            self._work.tensors.open(replica, stages, self._pulled())
            self._units += [_Unit(replica, stage, begin, begin) for stage in stages]

    # Passes

    def _advance(self) -> bool:
        """Compute one pass; False if none has what it needs."""
        # The last stages first: what they send back frees memory. Then the replica that has most to do.
        self._units.sort(key=lambda unit: (-unit.stage, unit.forward + unit.backward, unit.replica))
        for unit, at, back, version in self._next():
            if self._work.ready(at, back=back):
                self._point(unit.stage, version, late=at.step - version)
                self._pass(unit, at, back=back)
                return True
        return False

    def _pass(self, unit: _Unit, at: At, *, back: bool) -> None:
        held = unit.forward - unit.backward + (not back)
        together = sum(one.forward - one.backward for one in self._crew(unit)) + (not back)
        self._counts.passed(unit.stage, self._number(at), self._work.version, held, together, back=back)
        if back:
            if self._gaps is not None:
                self._count(unit)
            self._work.backward(at)
            unit.backward += 1
            return
        loss = self._work.forward(at)
        if unit.stage == self._work.last:
            unit.losses[at.step] = unit.losses.get(at.step, 0.0) + loss
        if at.microbatch == self._job.accumulate - 1 and at.replica == 0:
            unit.buffers[at.step] = self._work.tensors.buffers_of(0, at.stage)
        unit.forward += 1

    def _next(self) -> Iterator[tuple[_Unit, At, bool, int]]:
        """Passes that may follow, at most one each way of a unit, if they go back, and their version, which is here."""
        for unit in self._units:
            follows = self._pipeline.follows(
                unit, self._crew(unit), unit.stage, self._layout, step=self._step, steps=self._steps, first=self._first
            )
            for back in follows:
                step, microbatch = divmod(unit.backward if back else unit.forward, self._job.accumulate)
                at = At(step, unit.replica, unit.stage, microbatch)
                version = self._version(self._number(at), unit.stage, back=back)
                if version in self._versions.get(unit.stage, ()):
                    yield unit, at, back, version

    def _crew(self, unit: _Unit) -> list[_Unit]:
        """Units that the layout gives to the same worker: they are on one, whichever that is."""
        crew = self._layout.crew(unit.replica, unit.stage)
        return [
            one for one in self._units if one.stage == unit.stage and self._layout.crew(one.replica, one.stage) == crew
        ]

    def _number(self, at: At) -> int:
        return self._layout.number(at.step * self._job.accumulate + at.microbatch, at.replica)

    # Gaps

    def _count(self, unit: _Unit) -> None:
        version = self._work.version
        if not unit.runs or unit.runs[-1].version != version:
            if unit.runs:
                unit.runs[-1].gradients = self._work.tensors.take(unit.replica, [unit.stage])
            unit.runs.append(_Run(version))
        unit.runs[-1].passes += 1

    def _mitigated(self, unit: _Unit, last: Values) -> Values:
        assert self._gaps is not None
        runs, own = unit.runs, self._work.tensors.parameters[unit.stage]
        unit.runs = []
        runs[-1].gradients = {name: gradient for name, gradient in last.items() if name in own}
        parts = [
            GradientRun(
                one.gradients,
                None if one.version == self._step else self._used(unit.stage, one.version, self._step - one.version),
                one.passes / self._job.accumulate,
            )
            for one in runs
        ]
        return self._gaps.mitigated(self._step, parts, self._versions[unit.stage][self._step])

    # Versions

    def _version(self, number: int, stage: int, *, back: bool = False) -> int:
        version = self._pipeline.back_version if back else self._pipeline.version
        return version(number, stage, self._layout, first=self._first)

    def _point(self, stage: int, version: int, *, late: int) -> None:
        """Have the stage's parameters be those of a version, or what is predicted for `late` updates after it."""
        values = self._used(stage, version, late)
        self._work.version = version
        for name, parameter in self._work.tensors.parameters[stage].items():
            parameter.data = values[name]

    def _used(self, stage: int, version: int, late: int) -> Values:
        values = self._versions[stage].get(version)
        if self._predict is not None and late:
            values = self._predicted.get((version, stage, late))
        if values is None:
            raise InternalError(f"stage {stage} needs version {version}, but has {sorted(self._versions[stage])}")
        return values

    @property
    def _has_come(self) -> bool:
        return any(self._step in kept for kept in self._versions.values())

    def _arrive(self) -> None:
        """Wait for the open step's parameters, the newest there can be, and keep them."""
        if self._has_come:
            return
        self._exchange.settle()
        pulled = self._pulled()
        for stage in self._own:
            kept = self._versions.setdefault(stage, {})
            if self._pipeline.keeps_one and kept:
                _, values = kept.popitem()
                for name, one in values.items():
                    one.copy_(pulled[name].detach())
            else:
                values = {name: pulled[name].detach().clone() for name in self._work.tensors.parameters[stage]}
            if self._gaps is not None and self._step - 1 in kept:
                # A stage that has dropped it is never late.
                self._gaps.moved(self._step - 1, kept[self._step - 1], values)
            kept[self._step] = values
            self._counts.arrived(stage, self._step, kept)
        if self._predict is None:
            return
        for stage in self._own:
            for late in self._pipeline.late(self._step, stage, self._layout, first=self._first) - {0}:
                self._predicted[self._step, stage, late] = self._predict(stage, late)
