"""Base of rules that change a gradient, for example by its staleness, before the job's optimizer steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import DTYPES, Argument, RuleSpec, TensorKind, TensorSpec
from shardline.errors import JobError
from shardline.update.base import RuleState, Shape, Site, StateSpec, Update, UpdateRule, padding_positions
from shardline.update.elementwise import Run, StatesBucketRule
from shardline.update.torch_optim.rule import Torch

_TORCH = Torch()


def require_real(rule: UpdateRule, tensors: Sequence[TensorSpec]) -> None:
    """Raise JobError for a complex parameter."""
    for tensor in tensors:
        if tensor.kind is TensorKind.PARAM and DTYPES[tensor.dtype].is_complex:
            raise JobError(f"{tensor.name!r} has dtype {tensor.dtype}; {rule} updates real tensors only")


@dataclass(frozen=True)
class WrappingRule(UpdateRule):
    """Base of residents with a WrappingBucketRule; they run with any optimizer."""

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        _TORCH.check_tensors(spec, tensors)

    def wants_whole(self, spec: RuleSpec, shape: Sequence[int]) -> bool:
        return _TORCH.wants_whole(spec, shape)

    def own_states(self, dtype: torch.dtype, device: torch.device) -> Mapping[str, StateSpec]:
        """The rule's own states besides the optimizer's, with names that no torch optimizer uses."""
        return {}

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        return {**_TORCH.states(spec, group, dtype, device), **self.own_states(dtype, device)}

    def packing(self, spec: RuleSpec, state: str) -> Callable[[TensorSpec], Shape | None] | None:
        """See UpdateRule. The rule's own states have the layout of the values."""
        return _TORCH.packing(spec, state)


class WrappingBucketRule(StatesBucketRule):
    """Base of bucket rules that change a gradient and pass it to the job's optimizer."""

    def __init__(self, rule: WrappingRule, site: Site) -> None:
        super().__init__(rule, site, rule.own_states(site.dtype, site.device))
        self.inner = _TORCH.make(site)
        self._padding = padding_positions(site.bucket, torch.device("cpu"))

    @abstractmethod
    def changed(self, run: Run, arguments: Mapping[str, Any], context: PushContext) -> Tensor:
        """The run's gradient for the optimizer: a new tensor, or run.gradient itself if nothing changes.

        run.values: the parameters before the update, not to be changed. Only the rule's own states and numbers are
        found in the run.
        """

    def carry_out(self, update: Update) -> None:
        with torch.no_grad():
            gradient = self._changed(update)
        self.inner.carry_out(replace(update, gradient=gradient))

    def _changed(self, update: Update) -> Tensor:
        values = update.values if update.source is None else update.source
        found = update.gradient
        for run in self.runs_of(update, values):
            part = self.changed(run, update.arguments, update.context)
            if part is run.gradient:
                continue
            if part.numel() == found.numel():
                return part
            if found is update.gradient:
                found = found.clone()
            found[run.span] = part
        return found

    def runs_of(self, update: Update, values: Tensor) -> list[Run]:
        """The runs of a push. values: the bucket's, for run.values."""
        return self.kept.runs(values, gradient=update.gradient, present=update.present, worker=update.context.task)

    def export(self) -> RuleState:
        inner = self.inner.export()
        if any(inner.initialized):
            self.kept.complete()
        tensors, scalars = self.kept.export(self._padding)
        return RuleState({**inner.tensors, **tensors}, {**inner.scalars, **scalars}, inner.initialized)

    def put(self, state: RuleState) -> None:
        self.inner.load(
            {key: tensor for key, tensor in state.tensors.items() if not self.kept.owns(key)},
            {key: numbers for key, numbers in state.scalars.items() if not self.kept.owns(key)},
            state.initialized,
        )
        self.kept.put(state)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.kept.nbytes
