"""Element-wise rules: one optimizer call for each run of neighbouring slices with equal per-slice state.

In the steady state all slices have a gradient and equal counters, so a bucket is one run and one call. If a tensor has
no gradient torch leaves it alone (no decay, no count), so counters diverge and the bucket splits into more runs. Where
torch rounds the last elements of a tensor otherwise than the rest, a run ends with such a tensor's last element.
Element-shaped states are flat tensors in the bucket's layout, and a run's optimizer has views of them; its 0-d states
are its own numbers, written back to the per-slice lists only when runs change or the state is exported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardline.core.plan import ALIGNMENT_ELEMENTS, padded
from shardline.update.base import Site, StateSpec, Update, padding_positions
from shardline.update.elementwise import neighbours
from shardline.update.torch_optim import adam, eager, sgd

_HALVES = (torch.float16, torch.bfloat16)
_CACHED_RUNS = 64
"""Optimizer objects kept per bucket for runs that may return (mixtures of experts alternate)."""


class _Run:
    """Slices [start, stop), elements [begin, end) of the bucket, and the optimizer that updates them in one call."""

    def __init__(self, start: int, stop: int, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        self.start, self.stop = start, stop
        self.parameter = parameter
        self.optimizer = optimizer
        self.nothing = parameter.detach()[:0].clone()
        # Between steps no reference to the bucket's buffers is kept.
        parameter.data = self.nothing

    def step(self, values: Tensor, gradient: Tensor, source: Tensor, arguments: Mapping[str, Any]) -> None:
        """One optimizer step on this run's part of the bucket; no reference to the three tensors is kept.

        source: the values before the step, possibly `values` itself.
        """
        if sgd.is_plain(type(self.optimizer), arguments):
            before = self.state().get("momentum_buffer")
            after = sgd.step(source, gradient, values, before, arguments)
            if after is not before and after is not None:
                self.set_state({"momentum_buffer": after})
            return
        group = self.optimizer.param_groups[0]
        group.update(arguments)
        if adam.is_plain(type(self.optimizer), group):
            state = adam.step(source, gradient, values, self.state(), group)
            if state is not None:
                self.set_state(state)
                return
        if source is not values:
            values.copy_(source)
        # values alternates between two buffers from call to call, so the parameter is set to it each time.
        self.parameter.data = values
        self.parameter.grad = gradient
        try:
            eager.step(self.optimizer)
        finally:
            self.parameter.grad = None
            self.parameter.data = self.nothing

    def state(self) -> dict[str, Tensor]:
        """Torch's own state of the run, without entries that are None."""
        if not self.optimizer.state:
            # A tensor's hash takes longer than all of this.
            return {}
        held: Mapping[str, Tensor | None] = self.optimizer.state.get(self.parameter, {})
        return {name: value for name, value in held.items() if value is not None}

    def set_state(self, state: dict[str, Tensor]) -> None:
        self.optimizer.state[self.parameter] = state


class ElementwiseStates:
    """Optimizer state of one bucket under an element-wise rule. Used by one thread at a time.

    flat: states by name, each as long as the bucket; zeros if a slice has none yet. Up to date only after collect():
    scalars, one number per slice by name, and initialized, per slice whether torch has a state for it.
    """

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        site: Site,
        kinds: Mapping[str, StateSpec],
    ) -> None:
        bucket, device = site.bucket, site.device
        self._cls = cls
        self._arguments = dict(arguments)
        self._bucket = bucket
        self._kinds = kinds
        self._device = device
        self._apart = _ends_apart(site, arguments)
        """Per slice, whether a run must end with its last element, without the padding."""
        self._ends = [
            piece.end if apart else min(piece.offset + padded(piece.elements), bucket.elements)
            for piece, apart in zip(bucket.slices, self._apart, strict=True)
        ]
        self.padding = padding_positions(bucket, device)
        """Positions of the padding, int64."""
        self._padded = self.padding.numel() > 0
        self.clear()

    def clear(self) -> None:
        count = len(self._bucket.slices)
        self.flat: dict[str, Tensor] = {}
        self.scalars: dict[str, list[float]] = {}
        self.initialized: list[bool] = [False] * count
        self._runs: list[_Run] = []
        self._present: tuple[bool, ...] | None = None
        self._settled = False
        self._cache: dict[tuple[int, int], _Run] = {}

    def apply(self, update: Update, arguments: Mapping[str, Any]) -> None:
        """Update the slices that are present. arguments: of this call."""
        values, gradient, present, source = update.values, update.gradient, update.present, update.source
        if not self._settled or present != self._present:
            self.collect()
            found = neighbours(len(self._ends), present, self._equal_state_key, self._apart)
            self._runs = [self._run(slices.start, slices.stop, values) for slices in list(found)]
            self._present = present
            # Runs don't change while the same slices are present: equal states advance equally.
            self._settled = True
        if source is not None and present is not None:
            # Runs over all slices cover all but padding.
            values.copy_(source)
            source = None
        for run in self._runs:
            begin, end = self._span(run.start, run.stop)
            if begin == 0 and end == self._bucket.elements:
                run.step(values, gradient, values if source is None else source, arguments)
            else:
                after = values[begin:end]
                run.step(after, gradient[begin:end], after if source is None else source[begin:end], arguments)
            if run.optimizer.state and not self.initialized[run.start]:
                self._adopt(run)
        if self._padded:
            # With eps=0 the padding becomes 0/0.
            values.index_fill_(0, self.padding, 0)

    def collect(self) -> None:
        """Write the numbers of the current runs back to the per-slice lists."""
        for run in self._runs:
            for name, state in run.state().items():
                if self._kinds[name].scalar:
                    number = float(state)
                    self.scalars[name][run.start : run.stop] = [number] * (run.stop - run.start)

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        return self._bucket.slices[start].offset, self._ends[stop - 1]

    def _equal_state_key(self, number: int) -> tuple[float, ...]:
        if not self.initialized[number]:
            return (0.0,)
        return (1.0, *(numbers[number] for numbers in self.scalars.values()))

    def _run(self, start: int, stop: int, values: Tensor) -> _Run:
        run = self._cache.get((start, stop))
        begin, end = self._span(start, stop)
        fresh = not self.initialized[start]
        if run is None or (fresh and run.state()):
            # Some classes create their state in the constructor, so the parameter needs its true size there.
            parameter = torch.nn.Parameter(values[begin:end])
            run = _Run(start, stop, parameter, self._cls([parameter], **self._arguments))
            if len(self._cache) >= _CACHED_RUNS:
                self._cache.clear()
            self._cache[start, stop] = run
        if not fresh:
            state = {name: flat[begin:end] for name, flat in self.flat.items()}
            for name, numbers in self.scalars.items():
                kind = self._kinds[name]
                state[name] = torch.tensor(numbers[start], dtype=kind.dtype, device=kind.device)
            run.set_state(state)
        return run

    def _adopt(self, run: _Run) -> None:
        """Make the state that torch created on these slices' first gradient the flat tensors, or a part of them."""
        state = run.state()
        if not state:
            return
        begin, end = self._span(run.start, run.stop)
        count = len(self._bucket.slices)
        for name, value in state.items():
            if self._kinds[name].scalar:
                self.scalars.setdefault(name, [0.0] * count)
                continue
            if name not in self.flat and value.numel() == self._bucket.elements:
                # No other run has slices in it: a copy would leave a gap of its size in the heap.
                self.flat[name] = value
                continue
            if name not in self.flat:
                self.flat[name] = torch.zeros(self._bucket.elements, dtype=value.dtype, device=self._device)
            view = self.flat[name][begin:end]
            view.copy_(value)
            state[name] = view
        run.set_state(state)
        self.initialized[run.start : run.stop] = [True] * (run.stop - run.start)
        # Slices whose state just began may now have the same state as their neighbours.
        self._settled = False

    def set_state(self, flat: dict[str, Tensor], scalars: dict[str, list[float]], initialized: Sequence[bool]) -> None:
        self.clear()
        self.flat, self.scalars, self.initialized = flat, scalars, list(initialized)

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flat.values())


def rounds_by_position(site: Site, arguments: Mapping[str, Any]) -> bool:
    """Return whether torch's rounding of an element may depend on its place in a tensor or in a thread's part."""
    return site.device.type == "cpu" and (site.dtype in _HALVES or bool(arguments.get("fused")))


def _ends_apart(site: Site, arguments: Mapping[str, Any]) -> list[bool]:
    """Per slice of the bucket, whether torch rounds the tensor's last elements, which are in it, in a way of their own.

    On a CPU torch computes whole vectors, and what is left over one by one. float16 and bfloat16 are then rounded after
    each operation rather than once, as in x.add_(y, alpha=a), and fused kernels don't fuse a product with an addition.
    The plan cuts such tensors at multiples of 64 elements only, so what is left over is that of the whole tensor.
    """
    by_position = rounds_by_position(site, arguments)
    found = []
    for piece in site.bucket.slices:
        tensor = site.tensors[piece.tensor]
        last = piece.first_row + piece.rows == tensor.rows
        found.append(by_position and last and tensor.elements % ALIGNMENT_ELEMENTS != 0)
    return found
