"""Base of rules that change a gradient, for example by its staleness, before the job's optimizer steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardline.core.push_context import PushContext
from shardline.core.spec import Argument, RuleSpec, TensorSpec
from shardline.update.base import (
    BucketRule,
    RuleState,
    Shape,
    Site,
    StateSpec,
    Update,
    UpdateRule,
    padding_positions,
    without_values,
)
from shardline.update.elementwise import States
from shardline.update.torch_optim.rule import Torch

_TORCH = Torch()


@dataclass(frozen=True)
class WrappingRule(UpdateRule):
    """Base of residents with a WrappingBucketRule; they run with any optimizer."""

    def check_tensors(self, spec: RuleSpec, tensors: Sequence[TensorSpec]) -> None:
        """See UpdateRule."""
        _TORCH.check_tensors(spec, tensors)

    def wants_whole(self, spec: RuleSpec, shape: Sequence[int]) -> bool:
        """See UpdateRule."""
        return _TORCH.wants_whole(spec, shape)

    def own_states(self, dtype: torch.dtype, device: torch.device) -> Mapping[str, StateSpec]:
        """The rule's own states besides the optimizer's, with names that no torch optimizer uses."""
        return {}

    def states(
        self, spec: RuleSpec, group: Mapping[str, Argument], dtype: torch.dtype, device: torch.device
    ) -> Mapping[str, StateSpec]:
        """See UpdateRule."""
        return {**_TORCH.states(spec, group, dtype, device), **self.own_states(dtype, device)}

    def packing(self, spec: RuleSpec, state: str) -> Callable[[TensorSpec], Shape | None] | None:
        """See UpdateRule. The rule's own states have the layout of the values."""
        return _TORCH.packing(spec, state)


class WrappingBucketRule(BucketRule):
    """Base of bucket rules that change a gradient and pass it to the job's optimizer."""

    def __init__(self, rule: WrappingRule, site: Site) -> None:
        super().__init__(rule, site)
        self.inner = _TORCH.make(site)
        self.kept = States(self, tuple(rule.own_states(site.dtype, site.device)))
        self._padding = padding_positions(site.bucket, torch.device("cpu"))

    @abstractmethod
    def changed(self, values: Tensor, gradient: Tensor, arguments: Mapping[str, Any], context: PushContext) -> Tensor:
        """The gradient for the optimizer: a new tensor, or `gradient` itself if nothing changes.

        values: the parameters before the update. Both are flat and must not be changed; slices without a gradient
        contain arbitrary finite values.
        """

    def carry_out(self, update: Update) -> None:
        """See BucketRule."""
        values = update.values if update.source is None else update.source
        with torch.no_grad():
            gradient = self.changed(values, update.gradient, update.arguments, update.context)
        self.inner.carry_out(replace(update, gradient=gradient))

    @property
    def workers(self) -> frozenset[str]:
        """See BucketRule."""
        return self.kept.workers()

    def left(self, worker: str) -> None:
        """See BucketRule."""
        self.kept.drop(worker)

    def export(self) -> RuleState:
        """See BucketRule."""
        inner = self.inner.export()
        if any(inner.initialized):
            self.kept.complete()
        tensors, scalars = self.kept.export(self._padding)
        return RuleState({**inner.tensors, **tensors}, {**inner.scalars, **scalars}, inner.initialized)

    def load(
        self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> None:
        """See BucketRule."""
        begun = list(initialized) or [False] * len(self.site.bucket.slices)
        given = without_values(tensors)
        self.check_state(given, scalars, begun)
        self.inner.load(
            {key: tensor for key, tensor in given.items() if not self.kept.owns(key)},
            {key: numbers for key, numbers in scalars.items() if not self.kept.owns(key)},
            begun,
        )
        self.kept.load(given, scalars)

    @property
    def nbytes(self) -> int:
        """See BucketRule."""
        return self.inner.nbytes + self.kept.nbytes
