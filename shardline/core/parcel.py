"""What stages of a pipeline hand to each other: activations one way, their gradients the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardline.core.fixed import fixed
from shardline.core.spec import itemsize
from shardline.errors import JobError, ProtocolError

Values = torch.Tensor | tuple[torch.Tensor, ...]
"""What one stage hands to the next."""


@fixed(order=True)
class ParcelKey:
    """Which pass a parcel is for. A repeated pass makes the same bits, so a second parcel of a key changes nothing."""

    step: int
    replica: int
    stage: int
    """The stage that it is for."""
    microbatch: int
    back: bool
    """It is a gradient for a backward pass, not an activation for a forward pass."""

    def __str__(self) -> str:
        what = "gradient" if self.back else "activation"
        return (
            f"the {what} for stage {self.stage} of replica {self.replica}, microbatch {self.microbatch} of step "
            f"{self.step}"
        )


@dataclass(frozen=True)
class Form:
    """What a codec has made bytes of."""

    codec: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions from the slowest to the fastest in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, before the codec."""
        return math.prod(self.shape) * itemsize(self.dtype)


@fixed()
class Parcel:
    """The tensors for one pass of one stage."""

    key: ParcelKey
    values: tuple[torch.Tensor, ...]
    """Any number, of any dtypes and shapes. An activation has each tensor once, also if a tuple has it twice. Of one
    that a codec has encoded, its bytes."""
    needs_grad: tuple[bool, ...] = ()
    """Of an activation, by tensor: whether its stage takes a gradient for it."""
    places: tuple[int, ...] = ()
    """Of an activation: which of `values` each element of the tuple is that a stage has returned; empty: it returned
    one tensor. Of a gradient: which tensor of the activation each of `values` is for; the others have had no part in
    the loss."""
    random_state: bytes = b""
    """State of torch's generator after the forward pass, with which the next stage goes on; empty in gradients."""
    forms: tuple[Form | None, ...] = ()
    """By tensor, what it was before a codec encoded it; None: it is as it was. Empty: all are."""

    sender: str = field(default="", compare=False)
    """The worker that it came from; empty: this one."""

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values)

    def unusable(self, why: object) -> ProtocolError:
        """The error for a parcel that its sender can't have made of a pass."""
        return ProtocolError(
            f"{self.sender or 'this worker'} sent {self.key} that can't be used: {why}; is it another version of "
            "Shardline, or has somebody taken its place?"
        )

    def form(self, number: int) -> Form | None:
        return self.forms[number] if self.forms else None

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors, before the codec."""
        forms = (self.form(number) for number in range(len(self.values)))
        return sum(
            value.nbytes if form is None else form.nbytes for value, form in zip(self.values, forms, strict=True)
        )


def memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest, so that the receiver's kernels see the same memory layout."""
    strides = value.stride()
    return tuple(sorted(range(value.dim()), key=lambda number: -strides[number]))


def flat(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor on the CPU with its dimensions in this order, flat; a view where that is possible."""
    return value.detach().cpu().permute(*order).contiguous().reshape(-1) if order else value.detach().cpu().reshape(-1)


def unflat(values: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """The inverse of flat(), a view."""
    turned = values.reshape([shape[number] for number in order])
    return turned.permute([order.index(number) for number in range(len(shape))])


def only_input(inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """What a sequence of layers begins with. Raises JobError if it was called with anything but one input."""
    if len(inputs) != 1 or named:
        raise JobError(
            f"a shardline.Pipeline takes one input, a tensor or a tuple of tensors, but was called with "
            f"{len(inputs)}{''.join(f', and {name}' for name in named)}"
        )
    return inputs[0]


def pack(returned: Any, stage: int, end: str) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """What a stage has returned as Parcel.values and Parcel.places.

    end: the layer that returned it, for messages. Raises JobError for anything but tensors, one of which can have a
    gradient.
    """
    elements = returned if isinstance(returned, tuple) else (returned,)
    for element in elements:
        if not isinstance(element, torch.Tensor):
            what = f"a tuple with a {type(element).__name__}" if isinstance(returned, tuple) else type(element).__name__
            raise JobError(
                f"{end} returned {what}, but what goes from stage {stage} to the next is a tensor or a tuple of "
                "tensors; cut the model elsewhere, or wrap the layer"
            )
    values = tuple({id(element): element for element in elements}.values())
    if not any(value.is_floating_point() or value.is_complex() for value in values):
        raise JobError(
            f"{end} returned {', '.join(str(value.dtype) for value in values) or 'an empty tuple'}, which has no "
            f"gradient, at the end of stage {stage}; cut the model elsewhere"
        )
    numbers = {id(value): number for number, value in enumerate(values)}
    return values, tuple(numbers[id(element)] for element in elements) if isinstance(returned, tuple) else ()


def unpack(values: Sequence[torch.Tensor], places: Sequence[int]) -> Values:
    """What the stage before has returned: see pack()."""
    return tuple(values[number] for number in places) if places else values[0]
