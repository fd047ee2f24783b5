"""Hooks on a model's parameters that report complete gradients."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from shardline.core.plan import Plan
from shardline.core.spec import TensorKind

Listener = Callable[[int, torch.Tensor], None]
"""(tensor number, parameter): called when its gradient of a backward pass is complete."""


class GradientHooks:
    """A hook on every trained parameter; calls one listener, if any."""

    def __init__(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        self._trained = [
            (number, tensors[number]) for number, spec in enumerate(plan.tensors) if spec.kind is TensorKind.PARAM
        ]
        self._handles: dict[int, RemovableHandle] = {}
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Call this listener from now on. Parameters that have become trainable since get hooks too.

        Each is the parameter's last hook, so that the user's can't change a gradient that has left.
        """
        self._listener = listener
        for number, tensor in self._trained:
            if not (tensor.requires_grad and tensor.is_leaf):
                continue
            handle = self._handles.get(number)
            others = tensor._post_accumulate_grad_hooks
            if handle is not None and (not others or next(reversed(others)) != handle.id):
                handle.remove()
                handle = None
            if handle is None:
                hook = functools.partial(self._fired, number)
                self._handles[number] = tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def ignore(self) -> None:
        self._listener = None

    def _fired(self, number: int, parameter: torch.Tensor) -> None:
        listener = self._listener
        if listener is not None:
            listener(number, parameter)

    def close(self) -> None:
        self.ignore()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class FireCount:
    """How often each parameter's gradient is completed in one backward pass. A listener of GradientHooks.

    Once, unless a pass runs others within itself (reentrant checkpointing) or there are several passes: then the
    gradient is complete only when all have ended.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, number: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete."""
        with self._lock:
            self._counts[number] += 1

    @property
    def once(self) -> set[int]:
        """Numbers of the parameters whose gradients are complete when their hook is called."""
        return {number for number, count in self._counts.items() if count == 1}
