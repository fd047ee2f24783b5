"""Computes stages of pipelines without a flush: a stream of passes over all steps, with versions of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardline.data import BatchSource, DataSource
from shardline.errors import InternalError
from shardline.pipeline.model import Pipeline
from shardline.pipeline.parcel import ParcelKey
from shardline.pipeline.schedules.unbroken import Unbroken, ahead
from shardline.pipeline.stage_work import At, Parcels, StageWork

Values = Mapping[str, torch.Tensor]


class StageExchange(Parcels, Protocol):
    """Parcels, and the exchange of parameters with the servers."""

    def settle(self) -> None:
        """Wait until the parameters of the open step are in the tensors that pulls fill. Raises if they don't come."""
        ...

    def staleness(self, stage: int, steps: int) -> None:
        """Note how many updates the parameters of a finished step had missed at most."""
        ...


@dataclass
class _Stream:
    """One replica's passes through this worker's stages. Microbatches are counted from the job's first one."""

    forward: dict[int, int]
    """The next forward pass, by stage."""
    backward: dict[int, int]
    losses: dict[int, float] = field(default_factory=dict)
    """Sum over the microbatches, by step, of the last stage."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those of this replica, as its forward passes leave them."""
    brought: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Buffers after the last forward pass of a step, by step."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A worker's part of one replica's step."""

    gradients: Values
    """Mean over the microbatches, by name."""
    buffers: Values
    loss: float | None
    """Mean over the microbatches, where the last stage is."""


class StreamRunner:
    """Computes some stages, for schedules without a flush. Used by one thread.

    While one step is computed, so are forward passes of the next ones: every step begins in the middle. The model's
    parameters are pointed at the version that a pass needs; a backward pass has that of its forward pass.

    pulled: the tensors that pulls fill, by name. steps: of the job.
    """

    def __init__(
        self,
        model: Pipeline,
        job: DataSource,
        source: BatchSource,
        pipeline: Unbroken,
        exchange: StageExchange,
        *,
        pulled: Callable[[], Values],
        steps: int,
    ) -> None:
        self._job = job
        self._pipeline = pipeline
        self._exchange = exchange
        self._pulled = pulled
        self._steps = steps
        self._work = StageWork(model, job, source, exchange)
        self._stages = model.num_stages
        self._parameters: list[dict[str, torch.nn.Parameter]] = [{} for _ in range(self._stages)]
        self._buffers: list[dict[str, torch.Tensor]] = [{} for _ in range(self._stages)]
        for name, parameter in model.named_parameters():
            self._parameters[model.stage_of_tensor(name)][name] = parameter
        for name, buffer in model.named_buffers():
            self._buffers[model.stage_of_tensor(name)][name] = buffer
        self._step = self._first = 0
        self._history: tuple[int, Mapping[int, Sequence[int]]] = (-1, {})
        """Timeline, and stages by replica."""
        self._versions: dict[int, Values] = {}
        """Parameters of this worker's stages, by version."""
        self._streams: dict[int, _Stream] = {}
        self._parts: dict[int, StepPart] = {}
        """Of the open step, by replica."""
        self._inside: int | None = None
        """The replica whose buffers are in the model."""

    @property
    def samples(self) -> int:
        """Samples of a replica's part of a step."""
        return self._job.batch_size * self._job.accumulate

    def begin(self, step: int, timeline: int, stages: Mapping[int, Sequence[int]]) -> None:
        """Compute this step next. stages: of this worker, by replica.

        The pipeline is empty where the job's history, or this worker's part of it, is another one than before.
        """
        if (timeline, stages) != self._history or step not in (self._step, self._step + 1):
            self._history = (timeline, stages)
            self._first = step
            self._work.clear()
            self._versions.clear()
            self._streams.clear()
            self._parts.clear()
            self._inside = None
            for parameters in self._parameters:
                for parameter in parameters.values():
                    # Of a step that was left in the middle.
                    parameter.grad = None
        elif step != self._step:
            self._parts.clear()
        self._step = step

    def run(self, replica: int) -> StepPart:
        """Compute the open step of a replica, and what can be computed of the next ones.

        Called again for the same step, it goes on. Raises what StageWork.forward() and the StageExchange raise.
        """
        if replica not in self._parts:
            self._parts[replica] = self._compute(replica)
        return self._parts[replica]

    def _compute(self, replica: int) -> StepPart:
        stream = self._enter(replica)
        count, stages = self._job.accumulate, self._history[1][replica]
        end = (self._step + 1) * count
        while any(stream.backward[stage] < end for stage in stages):
            if self._advance(replica, stream, end):
                continue
            if self._step not in self._versions:
                self._arrive()
            else:
                self._exchange.wait(self._awaited(replica, stream, end))
        self._arrive()
        self._forget(stages)
        gradients = {}
        for stage in stages:
            self._exchange.staleness(stage, self._step - self._version(self._step * count, stage))
            for name, parameter in self._parameters[stage].items():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
                parameter.grad = None
        total = stream.losses.pop(self._step, 0.0)
        loss = total / count if self._work.last in stages else None
        return StepPart(gradients=gradients, buffers=stream.brought.pop(self._step, {}), loss=loss)

    # Passes

    def _advance(self, replica: int, stream: _Stream, end: int) -> bool:
        """Compute one pass; False if none has what it needs."""
        # The last stages first: what they send back frees memory.
        for stage in sorted(self._history[1][replica], reverse=True):
            number = stream.forward[stage]
            if number < self._limit(stream, stage, end) and self._version(number, stage) in self._versions:
                at = self._at(replica, stage, number)
                if self._work.ready(at, back=False):
                    self._forward(stream, at, number)
                    return True
            number = stream.backward[stage]
            if number < min(end, stream.forward[stage]):
                at = self._at(replica, stage, number)
                if self._work.ready(at, back=True):
                    self._point(stage, self._version(number, stage))
                    self._work.backward(at)
                    stream.backward[stage] += 1
                    return True
        return False

    def _forward(self, stream: _Stream, at: At, number: int) -> None:
        self._point(at.stage, self._version(number, at.stage))
        both = {0, self._work.last} <= set(self._history[1][at.replica])
        loss = self._work.forward(at, keep_batch=both)
        stream.losses[at.step] = stream.losses.get(at.step, 0.0) + loss
        if at.microbatch == self._job.accumulate - 1 and at.replica == 0:
            own = {name: stream.buffers[name].clone() for name in self._buffers[at.stage]}
            stream.brought.setdefault(at.step, {}).update(own)
        stream.forward[at.stage] += 1

    def _limit(self, stream: _Stream, stage: int, end: int) -> int:
        """Forward passes before this one may be computed."""
        if stream.backward[stage] >= end:
            return 0
        return min(stream.backward[stage] + ahead(stage, self._stages) + 1, self._steps * self._job.accumulate)

    def _awaited(self, replica: int, stream: _Stream, end: int) -> list[ParcelKey]:
        found = []
        for stage in self._history[1][replica]:
            number = stream.forward[stage]
            if number < self._limit(stream, stage, end):
                found.append(self._work.needs(self._at(replica, stage, number), back=False))
            number = stream.backward[stage]
            if number < min(end, stream.forward[stage]):
                found.append(self._work.needs(self._at(replica, stage, number), back=True))
        return [key for key in found if key is not None]

    def _at(self, replica: int, stage: int, number: int) -> At:
        return At(number // self._job.accumulate, replica, stage, number % self._job.accumulate)

    # Versions

    def _version(self, number: int, stage: int) -> int:
        return self._pipeline.version(number, stage, self._stages, self._job.accumulate, first=self._first)

    def _point(self, stage: int, version: int) -> None:
        """Have the stage's parameters be those of a version."""
        values = self._versions.get(version)
        if values is None:
            raise InternalError(f"stage {stage} needs version {version}, but has {sorted(self._versions)}")
        self._work.version = version
        for name, parameter in self._parameters[stage].items():
            parameter.data = values[name]

    def _arrive(self) -> None:
        """Wait for the open step's parameters, the newest there can be, and keep them."""
        if self._step in self._versions:
            return
        self._exchange.settle()
        pulled = self._pulled()
        own = {stage for stages in self._history[1].values() for stage in stages}
        self._versions[self._step] = {
            name: pulled[name].detach().clone() for stage in own for name in self._parameters[stage]
        }

    def _forget(self, stages: Sequence[int]) -> None:
        """Drop versions that no pass needs any more, when the open step is done in all replicas."""
        following = (self._step + 1) * self._job.accumulate
        own = {stage for found in self._history[1].values() for stage in found}
        oldest = min(self._version(following, stage) for stage in own)
        if set(self._parts) | {self._inside} >= set(self._history[1]):
            for version in [version for version in self._versions if version < oldest]:
                del self._versions[version]

    # Buffers: each replica's forward passes change its own, in their order.

    def _enter(self, replica: int) -> _Stream:
        stages = self._history[1][replica]
        if replica not in self._streams:
            self._arrive()
            begin = self._first * self._job.accumulate
            stream = _Stream(dict.fromkeys(stages, begin), dict.fromkeys(stages, begin))
            pulled = self._pulled()
            for stage in stages:
                stream.buffers.update({name: pulled[name].detach().clone() for name in self._buffers[stage]})
            self._streams[replica] = stream
        stream = self._streams[replica]
        if self._inside != replica:
            for stage in stages:
                for name, buffer in self._buffers[stage].items():
                    buffer.data = stream.buffers[name]
            self._inside = replica
        return stream
