"""Gradients that autograd accumulates in memory the server reads, and which of them a pass has really computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle


class SharedGradients:
    """Lends shared memory to the .grad of a worker's parameters, step by step.

    Used by one thread; autograd may call the hooks on another.

    tensors: the worker's, by name. view: memory to compute a tensor's gradient in, or None if there is currently none.

    A lent .grad exists from the beginning of a pass, full of zeros. In plain torch it is None until the pass computes a
    gradient, and rules with weight decay or momentum distinguish the two: so parameters that got a gradient are
    recorded.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], view: Callable[[str], torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._view = view
        self._lent: dict[str, torch.Tensor] = {}
        """Tensors that .grad was set to, by name."""
        self._present: set[str] = set()
        """Names of parameters that would have a gradient in plain torch."""
        self._handles: dict[str, RemovableHandle] = {}

    def zero(self, *, set_to_none: bool = True) -> None:
        """As torch's zero_grad: existing gradients become None, or zeros with set_to_none=False."""
        kept = set() if set_to_none else {name for name, tensor in self._trained() if self._has(name, tensor)}
        self._present = kept
        for name, tensor in self._trained():
            lent = self._view(name)
            lent = torch.zeros_like(tensor, requires_grad=False) if lent is None else lent.zero_()
            tensor.grad = self._lent[name] = lent
            if name not in self._handles:
                hook = functools.partial(self._computed, name)
                self._handles[name] = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, item) for name, item in self._tensors.items() if item.requires_grad and item.is_leaf]

    def _computed(self, name: str, parameter: torch.Tensor) -> None:
        self._present.add(name)

    def _has(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor has a gradient in torch's sense: computed by a pass, or set by hand."""
        if tensor.grad is None or tensor.grad is not self._lent.get(name) or name in self._present:
            return tensor.grad is not None
        return bool(tensor.grad.count_nonzero())

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the open step by name; a parameter that took no part has none: its .grad becomes None."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            if self._has(name, tensor):
                assert tensor.grad is not None
                found[name] = tensor.grad
            else:
                tensor.grad = None
        return found

    def take_back(self) -> None:
        """Make every .grad a private copy, since the server may still read the lent memory."""
        for name, lent in self._lent.items():
            if self._tensors[name].grad is lent:
                self._tensors[name].grad = self._lent[name] = lent.clone()

    def close(self) -> None:
        self.take_back()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
