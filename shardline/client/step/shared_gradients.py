"""Gradients that autograd adds up in memory which the server reads, and which of them a pass has really computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle


class SharedGradients:
    """Lends .grad to a worker's parameters, step by step. Used by one thread; autograd may call the hooks on another.

    tensors: the worker's own by name. view: memory to compute one's gradient in, or None if there is none now.

    A .grad that was lent is there from the beginning of a pass, full of zeros. Plain torch has None until the pass
    gives the parameter a gradient, and rules that decay weights or have momentum tell the two apart: so it is noted
    which parameters got one.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], view: Callable[[str], torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._view = view
        self._lent: dict[str, torch.Tensor] = {}
        """What .grad was set to, by name."""
        self._present: set[str] = set()
        """Lent gradients that plain torch would have."""
        self._handles: dict[str, RemovableHandle] = {}

    def zero(self, *, set_to_none: bool = True) -> None:
        """As torch's zero_grad: what had a gradient has none, or with set_to_none=False one of zeros."""
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
        """Whether a tensor has a gradient in torch's sense: computed by a pass, or put there by hand."""
        if tensor.grad is None or tensor.grad is not self._lent.get(name) or name in self._present:
            return tensor.grad is not None
        return bool(tensor.grad.count_nonzero())

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the open step by name; what took no part in it has none, and its .grad becomes None."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            if self._has(name, tensor):
                assert tensor.grad is not None
                found[name] = tensor.grad
            else:
                tensor.grad = None
        return found

    def take_back(self) -> None:
        """What was lent may be read by the server for longer: every .grad is a private copy from now on."""
        for name, lent in self._lent.items():
            if self._tensors[name].grad is lent:
                self._tensors[name].grad = self._lent[name] = lent.clone()

    def close(self) -> None:
        """Leave the parameters without hooks, their gradients private."""
        self.take_back()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
