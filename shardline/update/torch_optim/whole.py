"""Whole-tensor rules: one optimizer over all slices of a bucket, each with its tensor's real shape.

Slices under such rules are never cut, so torch does everything itself: it skips parameters without gradient and keeps
the state of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardline.update.base import Site, StateSpec, Update, UpdateRule
from shardline.update.torch_optim import eager


class WholeStates:
    """Optimizer state of one bucket under a whole-tensor rule. Used by one thread at a time."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        rule: UpdateRule,
        site: Site,
        kinds: Mapping[str, StateSpec],
    ) -> None:
        self._rule = rule
        self._site = site
        self._bucket = site.bucket
        self._specs = [site.tensors[piece.tensor] for piece in site.bucket.slices]
        self._kinds = kinds
        dtype, device = site.dtype, site.device
        self._parameters = [
            torch.nn.Parameter(torch.empty((1,) * len(spec.shape), dtype=dtype, device=device)) for spec in self._specs
        ]
        self._nothing = [parameter.detach() for parameter in self._parameters]
        self._optimizer = make(self._parameters, **arguments)

    def apply(self, update: Update, arguments: Mapping[str, Any]) -> None:
        """Update the slices that are present. arguments: of this call."""
        values, gradient, present = update.values, update.gradient, update.present
        if update.source is not None:
            values.copy_(update.source)
        for number, (piece, spec) in enumerate(zip(self._bucket.slices, self._specs, strict=True)):
            # torch's norms divide by the number of elements.
            if piece.elements and (present is None or present[number]):
                parameter = self._parameters[number]
                parameter.data = values[piece.offset : piece.end].view(spec.shape)
                parameter.grad = gradient[piece.offset : piece.end].view(spec.shape)
        self._optimizer.param_groups[0].update(arguments)
        try:
            eager.step(self._optimizer)
        finally:
            for parameter, nothing in zip(self._parameters, self._nothing, strict=True):
                parameter.grad = None
                parameter.data = nothing

    @property
    def initialized(self) -> list[bool]:
        """Per slice, whether torch has a state for it."""
        return [bool(self._optimizer.state.get(parameter)) for parameter in self._parameters]

    @property
    def flat(self) -> dict[str, Tensor]:
        """States by name, copied into flat tensors on the device; states that no slice has yet are left out."""
        found: dict[str, Tensor] = {}
        for name, kind in self._kinds.items():
            if kind.scalar or not any(self.initialized):
                continue
            length = self._rule.flat_elements(self._site.spec, name, self._bucket, self._site.tensors)
            if not length:
                continue
            found[name] = torch.zeros(length, dtype=kind.dtype, device=self._site.device)
            spans = self._spans(name)
            for parameter, (offset, elements) in zip(self._parameters, spans, strict=True):
                state = self._optimizer.state.get(parameter, {}).get(name)
                if state is not None:
                    found[name][offset : offset + elements] = state.flatten()
        return found

    @property
    def scalars(self) -> dict[str, list[float]]:
        """0-d states by name, one number per slice; 0 if a slice has none yet."""
        if not any(self.initialized):
            return {}
        return {
            name: [float(self._optimizer.state.get(parameter, {}).get(name, 0.0)) for parameter in self._parameters]
            for name, kind in self._kinds.items()
            if kind.scalar
        }

    def set_state(
        self, flat: Mapping[str, Tensor], scalars: Mapping[str, Sequence[float]], initialized: Sequence[bool]
    ) -> None:
        self._optimizer.state.clear()
        spans = {name: self._spans(name) for name in flat}
        for number, (parameter, spec) in enumerate(zip(self._parameters, self._specs, strict=True)):
            if not initialized[number]:
                continue
            state: dict[str, Tensor] = {}
            for name, numbers in scalars.items():
                kind = self._kinds[name]
                state[name] = torch.tensor(numbers[number], dtype=kind.dtype, device=kind.device)
            for name, values in flat.items():
                shape = self._rule.state_shape(self._site.spec, name, spec)
                if shape is not None:
                    offset, elements = spans[name][number]
                    state[name] = values[offset : offset + elements].clone().view(shape)
            self._optimizer.state[parameter] = state

    def _spans(self, name: str) -> tuple[tuple[int, int], ...]:
        return self._rule.state_spans(self._site.spec, name, self._bucket, self._site.tensors)

    @property
    def nbytes(self) -> int:
        return sum(
            state.nbytes
            for held in self._optimizer.state.values()
            for state in held.values()
            if isinstance(state, Tensor) and state.dim()
        )
