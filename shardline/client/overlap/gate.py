"""The next forward pass waits per layer: reading a tensor of the model waits until that tensor has arrived."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

WAITLESS = frozenset(
    (
        *("__set__", "__hash__", "__len__", "dim", "size", "numel", "nelement", "stride", "storage_offset"),
        *("ndimension", "element_size", "is_contiguous", "is_floating_point", "is_complex", "get_device"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    )
)
"""Tensor functions that do not read values."""
VALUE_GETTERS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Tensor attributes that give access to its values; others (grad, shape, dtype ...) don't wait."""


class Gate(TorchFunctionMode):
    """Watches the forward pass of one model within `with gate.open():`.

    Every torch function that gets one of the model's tensors waits for it, wherever it is called: in the tensor's own
    module or outside it (tied weights, functional use, a regulariser in the loss), in this step or for the first time
    ever. Modules without children also wait for their own tensors, since C++ code may read those unseen.

    numbers: tensor number by id() of the model's tensors. wait_for: returns when these tensors contain the step's
    values. waiting: whether there is anything to wait for.
    """

    def __init__(
        self,
        model: nn.Module,
        numbers: Mapping[int, int],
        *,
        wait_for: Callable[[Iterable[int]], None],
        waiting: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._numbers = numbers
        self._wait_for = wait_for
        self._waiting = waiting
        self._uses: dict[int, None] | None = None
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            held = tuple(numbers[id(tensor)] for tensor in own if tensor is not None and id(tensor) in numbers)
            if held and next(module.children(), None) is None:
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, held)))

    @contextlib.contextmanager
    def open(self, uses: dict[int, None] | None = None) -> Iterator[None]:
        """Watch what runs in this block on this thread. uses: collects the tensors in the order of their first use."""
        self._uses = uses
        try:
            with self:
                yield
        finally:
            self._uses = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of each of its functions."""
        kwargs = kwargs or {}
        if (self._uses is not None or self._waiting()) and reads_values(func):
            self._read(list(self._found(args)) + list(self._found(kwargs.values())))
        return func(*args, **kwargs)

    def _found(self, values: Iterable[Any]) -> Iterator[int]:
        """Numbers of the model's tensors among these arguments, including nested lists, tuples and dicts."""
        for value in values:
            if isinstance(value, torch.Tensor):
                number = self._numbers.get(id(value))
                if number is not None:
                    yield number
            elif isinstance(value, tuple | list):
                yield from self._found(value)
            elif isinstance(value, dict):
                yield from self._found(value.values())

    def _enter(self, held: Sequence[int], module: nn.Module, args: Any) -> None:
        if self._uses is not None or self._waiting():
            self._read(held)

    def _read(self, numbers: Sequence[int]) -> None:
        if self._uses is not None:
            self._uses.update(dict.fromkeys(numbers))
        if numbers and self._waiting():
            self._wait_for(numbers)

    def close(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def reads_values(func: Callable[..., Any]) -> bool:
    """Whether a torch function may read the values of its tensor arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "data") in VALUE_GETTERS
    return name not in WAITLESS


def why_not(model: nn.Module) -> str:
    """Why reads of the model can't be watched, as the end of a sentence; "" if they can."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{where} is a ScriptModule"
        if isinstance(module, nn.DataParallel):
            return f"{where} is a DataParallel, which reads parameters on other threads"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            return f"{where} is compiled"
    return ""
