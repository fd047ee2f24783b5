"""Base of the codecs that make pushes smaller by losing something: which tensors they take, and what they promise.

Each works on quanta of a tensor's rows (Scope.QUANTUM), so that the bits are the same wherever the plan cuts.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch

from shardline.codecs.base import Direction, Fidelity, Part, Scope, Turn
from shardline.codecs.parts import PartCodec
from shardline.core.reduce import is_finite
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer
from shardline.errors import JobError, ProtocolError

SMALL = 1024
"""Tensors with fewer elements are sent as they are: they are few bytes and often matter more than others."""
NOT_FINITE = b"\x00"
"""Payload of a part that contains NaN or infinity, or overflows while it is encoded. Others have 4 bytes at least."""


def is_large(tensor: TensorSpec) -> bool:
    """Whether it is worth losing precision: neither a vector (a bias, a norm's scale) nor a small tensor."""
    return len(tensor.shape) >= 2 and tensor.elements >= SMALL


class Lossy(PartCodec):
    """A lossy codec of gradients. It implements write() and read(), which never see a number that is not finite.

    If C(x) is what the decoder makes of x, then E||C(x) - x||^2 <= error_bound(d) * ||x||^2 for a part of d elements.
    For an unbiased codec (E C(x) = x) the bound is the literature's omega, and it needs no error memory. For a
    contraction the bound is 1 - delta < 1; it needs error memory unless the bound is tiny.
    """

    direction = Direction.PUSH
    scope = Scope.QUANTUM
    fidelity = Fidelity.LOSSY

    def stays_finite(self, magnitude: float) -> bool:
        return bool(torch.tensor(magnitude, dtype=torch.float64).to(torch.float32).isfinite())

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of the decoded values over the job's seeds is what was encoded. May be a class variable."""
        return False

    @abstractmethod
    def error_bound(self, elements: int) -> float:
        """Bound of the mean squared error of a part, relative to its squared norm; see the class."""

    @abstractmethod
    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """Encode a part's finite numbers, a flat CPU tensor that must not be written to, in at least 4 bytes.

        NOT_FINITE if they overflow in between.
        """

    @abstractmethod
    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        """A part's numbers, flat, in its tensor's dtype. Raises ProtocolError for what write() never makes."""

    def takes(self, tensor: TensorSpec) -> bool:
        """Trained float tensors with at least two dimensions and 1,024 elements."""
        return super().takes(tensor) and is_large(tensor)

    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        # Numbers beyond the range of float32, which scales have, are as good as infinite.
        return self.write(values, part, turn) if is_finite(values.float()) else NOT_FINITE

    def decode_part(self, payload: Buffer, part: Part) -> torch.Tensor:
        """See PartCodec. A part that was not finite comes back as NaN everywhere."""
        view = memoryview(payload)
        if view == NOT_FINITE:
            return values_like(part, float("nan"))
        return self.read(view, part)


def values_like(part: Part, value: float = 0.0) -> torch.Tensor:
    return torch.full((part.elements,), value, dtype=part.dtype)


def check_size(payload: memoryview, expected: int, part: Part) -> None:
    """Raise ProtocolError if a part does not have the expected length in bytes."""
    if len(payload) != expected:
        raise ProtocolError(
            f"part {part.tensor.name!r}: {len(payload)} bytes for {part.elements} elements; expected {expected}"
        )


def check_setting(codec: Lossy, name: str, least: float, most: float) -> None:
    """Raise JobError unless a setting is within [least, most]."""
    value = getattr(codec, name)
    if not least <= value <= most:
        raise JobError(f"codec {codec.name}: {name} is {value}; give a number from {least:g} to {most:g}")


def check_ratio(codec: Lossy, ratio: float) -> None:
    """Raise JobError unless a share of entries is above 0 and at most 1."""
    if not 0.0 < ratio <= 1.0:
        raise JobError(f"codec {codec.name}: ratio is {ratio}; give a number above 0 and at most 1")


def share(ratio: float, elements: int) -> int:
    """Number of entries that a ratio selects, at least one."""
    return min(elements, max(1, math.ceil(ratio * elements)))
