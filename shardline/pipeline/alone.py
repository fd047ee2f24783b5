"""Pipelines without a flush in one process: each stage's parameters as old as the schedule says, and nothing else.

It shares no code with the runner of stages, so that tests may compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardline.data import BatchSource, DataSource, check_loss, derive, seed_everything
from shardline.pipeline.base import PipelineSchedule
from shardline.pipeline.staged import StagedModel

Values = dict[str, torch.Tensor]


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
    ) -> None:
        """first: the step with which training begins, or goes on: the pipeline is empty there.

        predict: all parameters after 1, 2, ... steps of the optimizer without a gradient, so many; None = passes use
        their version as it is.
        """
        self._predict = predict
        self._predicted: dict[int, Sequence[Values]] = {}
        """By version."""
        self._job = job
        self._model = model
        self._schedule = schedule
        self._first = first
        self._source = BatchSource(job)
        self._history: dict[int, Values] = {}
        """All parameters, by version."""
        self._buffers: dict[int, Values] = {}
        """By replica."""

    def gradients(self, step: int, replica: int) -> float:
        """Compute a replica's gradients of a step into the parameters' .grad; returns the mean loss.

        The parameters are those of version `step`, before and after. Buffers are left as the replica's.
        """
        model, count = self._model, self._job.accumulate
        self._history.setdefault(step, _copies(dict(model.named_parameters())))
        if self._predict is not None and step not in self._predicted:
            self._predicted[step] = self._predict(model.num_stages - 1)
        oldest = min(self._version(step * count, stage) for stage in range(model.num_stages))
        self._history = {version: values for version, values in self._history.items() if version >= oldest}
        self._predicted = {version: found for version, found in self._predicted.items() if version >= oldest}
        buffers = dict(model.named_buffers())
        _assign(buffers, self._buffers.setdefault(replica, _copies(buffers)))
        model.zero_grad(set_to_none=True)
        total = 0.0
        for microbatch in range(count):
            self._enter(step * count + microbatch)
            batch = self._source.batch(step, replica, microbatch)
            seed_everything(derive(self._job.seed, step, replica, microbatch))
            loss = self._job.loss(model, batch)
            check_loss(loss)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        _assign(dict(model.named_parameters()), self._history[step])
        self._buffers[replica] = _copies(buffers)
        return total / count

    def _version(self, number: int, stage: int) -> int:
        return self._schedule.version(number, stage, self._model.num_stages, self._job.accumulate, first=self._first)

    def _enter(self, number: int) -> None:
        for name, parameter in self._model.named_parameters():
            stage = self._model.stage_of_tensor(name)
            version = self._version(number, stage)
            late = number // self._job.accumulate - version
            ahead = self._predict is not None and late > 0
            _assign({name: parameter}, self._predicted[version][late - 1] if ahead else self._history[version])


def _copies(values: Mapping[str, torch.Tensor]) -> Values:
    return {name: value.detach().clone() for name, value in values.items()}


def _assign(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])
