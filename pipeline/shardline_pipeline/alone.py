"""Pipelines in one process: each stage's parameters as old as the schedule says, and what a codec does between stages.

It shares no code with the runner of stages, so that tests may compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import shardline_pipeline as pipeline
from shardline import consistency
from shardline.core.parcel import ParcelKey, flat, memory_order, unflat
from shardline.core.spec import JobSpec
from shardline.data import BatchSource, DataSource, checked_loss, derive, replica_gradients, seed_everything
from shardline.division.base import Gradients
from shardline.errors import JobError, calling
from shardline.testing import copies
from shardline_pipeline.activation_coding import ActivationCoding, is_encoded
from shardline_pipeline.base import PipelineSchedule, StageLayout
from shardline_pipeline.by_stage import ByStage
from shardline_pipeline.schedules.gaps import Gaps, GradientRun
from shardline_pipeline.staged import StagedModel

Values = dict[str, torch.Tensor]


class CodedModel:
    """A model for the job's loss whose activations and gradients are encoded and decoded between its stages.

    run: StagedModel.run, or something in its place. copies: what is not encoded is copied, so that later changes of a
    weight that is handed on don't reach the next stage.
    """

    def __init__(
        self, job: DataSource, model: StagedModel, *, run: Callable[..., Any] | None = None, copies: bool = False
    ) -> None:
        self._model = model
        self._run = run or model.run
        self._copies = copies
        self._coding = ActivationCoding(str(job.codec_parcels), job.seed)
        self._step = self._replica = self._microbatch = 0

    def begin(self, step: int, replica: int) -> None:
        """The next call is for the first microbatch of this step, the one after for the second."""
        self._step, self._replica, self._microbatch = step, replica, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        returned = self._run(0, *inputs, **named)
        plain: list[torch.Tensor] = []
        for stage in range(1, self._model.num_stages):
            elements = returned if isinstance(returned, tuple) else (returned,)
            # A tensor that a tuple has twice goes once.
            different = {id(element): element for element in elements}
            handed = {
                name: self._handed(value, stage, number, plain)
                for number, (name, value) in enumerate(different.items())
            }
            plain = [value for value, encoded in handed.values() if not encoded]
            given = tuple(handed[id(element)][0] for element in elements)
            returned = self._run(stage, given if isinstance(returned, tuple) else given[0])
        self._microbatch += 1
        return returned

    def _handed(
        self, value: torch.Tensor, stage: int, number: int, plain: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """What a stage gets for a tensor, and whether it was encoded. plain: what the stage before has got plain."""
        as_it_is = value.clone() if self._copies else value, False
        if not is_encoded(value) or any(value is other for other in plain):
            return as_it_is
        there = ParcelKey(self._step, self._replica, stage, self._microbatch, back=False)
        back = ParcelKey(self._step, self._replica, stage - 1, self._microbatch, back=True)
        if self._coding.encode(value, there, number, "an output")[1] is None:
            return as_it_is
        return _Handed.apply(value, self._coding, there, back, number), True  # type: ignore[no-untyped-call]


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, coding: ActivationCoding, there: ParcelKey, back: ParcelKey, number: int
    ) -> Any:
        ctx.coding, ctx.key, ctx.number, ctx.order = coding, back, number, memory_order(value)
        payload, form = coding.encode(value, there, number, "an output")
        return coding.decode(payload, form, there, "an output").to(value.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # In the activation's order in memory, like a gradient that has been collected.
        ordered = unflat(flat(gradient, ctx.order), gradient.shape, ctx.order)
        payload, form = ctx.coding.encode(ordered, ctx.key, ctx.number, "a gradient")
        return ctx.coding.decode(payload, form, ctx.key, "a gradient").to(gradient.device), None, None, None, None


@dataclass
class _Part:
    """Microbatches of a step that a stage has computed with one version."""

    version: int
    microbatches: int = 0
    gradients: Values = field(default_factory=dict)


class Delayed:
    """Gradients of one replica after another, each microbatch of a stage under the parameters of its version."""

    def __init__(
        self,
        job: DataSource,
        model: StagedModel,
        schedule: PipelineSchedule,
        first: int,
        *,
        predict: Callable[[int], Sequence[Values]] | None = None,
        gaps: Gaps | None = None,
    ) -> None:
        """first: the step with which training begins, or goes on: the pipeline is empty there.

        predict: all parameters after 1, 2, ... steps of the optimizer without a gradient, so many; None = passes use
        their version as it is. gaps: None = gradients count whatever their parameters were.
        """
        self._gaps = gaps
        self._predict = predict
        self._predicted: dict[int, Sequence[Values]] = {}
        """By version."""
        self._job = job
        self._model = model
        self._staged = CodedModel(job, model, run=self._run, copies=True)
        self._schedule = schedule
        self._layout = StageLayout.of(model.hosts, model.num_stages, job.contributors, job.accumulate)
        self._first = first
        self._source = BatchSource(job)
        self._history: dict[int, Values] = {}
        """All parameters, by version."""
        self._buffers: dict[int, Values] = {}
        """By replica."""
        self._number = 0
        """The microbatch that is computed, see StageLayout."""

    def gradients(self, step: int, replica: int) -> float:
        """Compute a replica's gradients of a step into the parameters' .grad; returns the mean loss.

        The parameters are those of version `step`, before and after. Buffers are left as the replica's.
        """
        model, count = self._model, self._job.accumulate
        if step not in self._history:
            self._history[step] = copies(dict(model.named_parameters()))
            if self._gaps is not None and step > self._first:
                self._gaps.moved(step - 1, self._history[step - 1], self._history[step])
        if self._predict is not None and step not in self._predicted:
            self._predicted[step] = self._predict(model.num_stages - 1)
        oldest = min(self._version(self._layout.first(step), stage) for stage in range(model.num_stages))
        self._history = {version: values for version, values in self._history.items() if version >= oldest}
        self._predicted = {version: found for version, found in self._predicted.items() if version >= oldest}
        buffers = dict(model.named_buffers())
        _assign(buffers, self._buffers.setdefault(replica, copies(buffers)))
        model.zero_grad(set_to_none=True)
        total = 0.0
        parts: dict[int, list[_Part]] = {stage: [] for stage in range(model.num_stages)}
        self._staged.begin(step, replica)
        for microbatch in range(count):
            self._number, before = self._layout.number(step * count + microbatch, replica), copies(buffers)
            self._enter()
            batch = self._source.batch(step, replica, microbatch)
            seed_everything(derive(self._job.seed, step, replica, microbatch))
            with calling(f"loss(model, batch), in step {step} of replica {replica},"):
                loss = self._job.loss(self._staged, batch)  # type: ignore[arg-type]
            loss = checked_loss(loss)
            after = copies(buffers)
            self._enter(back=True)
            # What is repeated finds the buffers as they were, and changes nothing in them.
            _assign(buffers, before)
            if self._gaps is not None:
                self._begin_parts(parts)
            with calling(f"backward(), in step {step} of replica {replica},"):
                (loss / count).backward()  # type: ignore[no-untyped-call]
            _assign(buffers, after)
            total += float(loss.detach())
        _assign(dict(model.named_parameters()), self._history[step])
        if self._gaps is not None:
            self._begin_parts(parts, ended=True)
            for own in parts.values():
                self._mitigate(self._gaps, step, own)
        self._buffers[replica] = copies(buffers)
        return total / count

    def _begin_parts(self, parts: Mapping[int, list[_Part]], *, ended: bool = False) -> None:
        """Set gradients aside where a stage's version changes with this microbatch, or the step has ended."""
        for stage, own in parts.items():
            version = self._version(self._number, stage)
            if own and (ended or own[-1].version != version):
                for name, parameter in self._model.named_parameters():
                    if self._model.stage_of_tensor(name) == stage and parameter.grad is not None:
                        own[-1].gradients[name], parameter.grad = parameter.grad, None
            if ended:
                continue
            if not own or own[-1].version != version:
                own.append(_Part(version))
            own[-1].microbatches += 1

    def _mitigate(self, gaps: Gaps, step: int, parts: Sequence[_Part]) -> None:
        found = []
        for one in parts:
            late = step - one.version
            used = self._history[one.version] if self._predict is None or not late else None
            used = self._predicted[one.version][late - 1] if used is None else used
            found.append(GradientRun(one.gradients, used if late else None, one.microbatches / self._job.accumulate))
        named = dict(self._model.named_parameters())
        for name, gradient in gaps.mitigated(step, found, self._history[step]).items():
            named[name].grad = gradient

    def _run(self, stage: int, *inputs: Any, **named: Any) -> Any:
        """A stage, which is run again in the backward pass if that has other parameters and the schedule says so."""
        versions = {self._version(self._number, stage, back=back) for back in (False, True)}
        if len(versions) == 1 or not self._schedule.recompute:
            return self._model.run(stage, *inputs, **named)
        with set_checkpoint_early_stop(False):
            return checkpoint(self._model.run, stage, *inputs, use_reentrant=False, **named)

    def _version(self, number: int, stage: int, *, back: bool = False) -> int:
        version = self._schedule.back_version if back else self._schedule.version
        return version(number, stage, self._layout, first=self._first)

    def _enter(self, *, back: bool = False) -> None:
        number = self._number
        for name, parameter in self._model.named_parameters():
            stage = self._model.stage_of_tensor(name)
            version = self._version(number, stage, back=back)
            if back and version == self._version(number, stage):
                continue
            late = self._layout.step(number) - version
            ahead = self._predict is not None and late > 0
            _assign({name: parameter}, self._predicted[version][late - 1] if ahead else self._history[version])


def _assign(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        # Past autograd, as an update in the middle of a pipeline is: what it has kept of these is changed too.
        target.data.copy_(values[name])


def in_one_process(
    spec: JobSpec, job: DataSource, model: nn.Module, source: BatchSource, predict: Callable[[int], Any]
) -> Gradients:
    schedule = pipeline.of(spec)
    if isinstance(consistency.of(spec.consistency), ByStage) and spec.replicas > 1:
        raise JobError(
            "one process repeats what does not depend on who was first, but the replicas of a pipeline with "
            f"consistency {consistency.of(spec.consistency)} don't wait for each other; compare with replicas=1"
        )
    if pipeline.ranks(spec) > 1:
        raise JobError(
            "one process computes with whole layers, and a sum over ranks is rounded in another order; compare "
            "with the job with tensor_ranks=1, up to rounding"
        )
    assert isinstance(model, StagedModel), "checked when the job was read"
    if not schedule.flushes:
        delayed: list[Delayed] = []

        def compute_late(step: int, replica: int) -> float:
            if not delayed:
                gaps, ahead = Gaps(spec) if schedule.gap_aware else None, predict if schedule.predict else None
                delayed.append(Delayed(job, model, schedule, step, predict=ahead, gaps=gaps))
            return delayed[0].gradients(step, replica)

        return compute_late
    if not job.codec_parcels:
        return lambda step, replica: replica_gradients(model, job, source, step, replica)[0]
    coded = CodedModel(job, model)
    # A loss of what stages compute, where a codec encodes what they hand on.
    as_computed = replace(job, loss=lambda _, batch: job.loss(coded, batch))  # type: ignore[arg-type,type-var]

    def compute(step: int, replica: int) -> float:
        coded.begin(step, replica)
        return replica_gradients(model, as_computed, source, step, replica)[0]

    return compute
