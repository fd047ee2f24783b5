"""Base of codecs that encode each tensor, or each quantum of one, by itself: framing, bounds and error memory.

A payload is, for each part in the order of the bucket, its length (4 bytes, little-endian) and its bytes; a part
without a gradient has no bytes. A payload as long as the bucket is the bucket's own bytes, so none is ever longer.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from shardline.codecs.base import Codec, Direction, Fidelity, Layout, Memory, Part, Scope, Turn, zeros
from shardline.core.reduce import is_finite
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import JobError, ProtocolError

LENGTH = struct.Struct("<I")
ERROR = "error"
"""Name of a part's error memory: what is left to be sent."""


class PartCodec(Codec):
    """A codec of parts, optionally with error feedback.

    With error memory (Memory.DROPPED or RESTORED), the error of one encoding is added to the next (Karimireddy et al.,
    "Error Feedback Fixes SignSGD", 2019, algorithm 2).
    """

    scope = Scope.TENSOR

    @abstractmethod
    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """Encode a part's numbers, a flat CPU tensor that must not be written to, in at least one byte.

        If there is NaN or infinity among them, there must be some in the decoded part, wherever.
        """

    @abstractmethod
    def decode_part(self, payload: Buffer, part: Part) -> torch.Tensor:
        """A part's numbers, flat, in its tensor's dtype. Raises ProtocolError for what encode_part() never makes."""

    def wanted(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        """What to encode for a gradient: its numbers plus what was left to be sent. Used if there is a memory."""
        error = turn.memory.get((part.tensor.name, part.first_row, ERROR))
        return values if error is None else values + error

    def left(
        self, values: torch.Tensor, wanted: torch.Tensor, sent: torch.Tensor, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        """The part's memory by name after a turn, all new tensors. wanted: see wanted(); sent: what was decoded."""
        return {ERROR: wanted - sent}

    def remembered(
        self, values: torch.Tensor, wanted: torch.Tensor, data: Buffer | None, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        """The part's memory after a turn, empty if it stays as it was. data: what was sent; None = all of `wanted`."""
        sent = wanted if data is None else self.decode_part(data, part)
        # A gradient that is not finite skips its step or ends the job; in the memory it would spoil all later ones.
        return self.left(values, wanted, sent, part, turn) if is_finite(sent) else {}

    def max_part_bytes(self, part: Part) -> int:
        """Upper bound for encode_part(); the part's own bytes if unknown."""
        return part.elements * part.dtype.itemsize

    def sizes(self, layout: Layout) -> tuple[int, int]:
        parts = layout.parts(self.scope)
        return 0, min(layout.bucket.nbytes, sum(LENGTH.size + self._bound(part) for part in parts))

    def _bound(self, part: Part) -> int:
        own = part.elements * part.dtype.itemsize
        return self.max_part_bytes(part) if self.takes(part.tensor) else own

    def started(self, data: Buffer, part: Part) -> Mapping[str, torch.Tensor]:
        """What an encoding leaves only as a start for the next one, where no error is to be remembered."""
        return {}

    def coder(self, layout: Layout) -> PartCoder:
        return PartCoder(self, layout)


class PartCoder:
    """Encoder and decoder of one bucket."""

    def __init__(self, codec: PartCodec, layout: Layout) -> None:
        self._codec = codec
        self._layout = layout
        self._parts = [part for part in layout.parts(codec.scope) if part.elements]
        self._taken = {part.tensor.name for part in self._parts if codec.takes(part.tensor)}
        self._bounds = [codec._bound(part) for part in self._parts]

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        """Bytes of all parts that have a gradient; the new memory is left in the turn."""
        numbers = [values[part.offset : part.end] for part in self._parts]
        wanted = [self._wanted(one, part, turn) for part, one in zip(self._parts, numbers, strict=True)]
        if turn.whole:
            turn.memory.clear()
            return self._as_it_is(wanted)
        payloads = [
            self._encode_part(one, part, turn) if turn.has(part.piece) else b""
            for part, one in zip(self._parts, wanted, strict=True)
        ]
        whole = LENGTH.size * len(payloads) + sum(map(len, payloads)) >= self._layout.bucket.nbytes
        for part, given, one, data in zip(self._parts, numbers, wanted, payloads, strict=True):
            if data and self._remembers(part):
                if turn.owes:
                    found = self._codec.remembered(given, one, None if whole else data, part, turn)
                else:
                    found = self._codec.started(data, part)
                for name, tensor in found.items():
                    turn.memory[part.tensor.name, part.first_row, name] = tensor
        if whole:
            return self._as_it_is(wanted)
        return b"".join(piece for data in payloads for piece in (LENGTH.pack(len(data)), data))

    def _remembers(self, part: Part) -> bool:
        return self._codec.memory is not Memory.NONE and part.tensor.name in self._taken

    def _wanted(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        if not self._remembers(part) or not turn.has(part.piece):
            return values
        return self._codec.wanted(values, part, turn)

    def _encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        if part.tensor.name in self._taken:
            return self._codec.encode_part(values, part, turn)
        return tensor_bytes(values)

    def _as_it_is(self, wanted: Sequence[torch.Tensor]) -> Buffer:
        whole = zeros(self._layout)
        for part, numbers in zip(self._parts, wanted, strict=True):
            whole[part.offset : part.end] = numbers
        return tensor_bytes(whole)

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        view, bucket = memoryview(payload), self._layout.bucket
        if len(view) == bucket.nbytes:
            return tensor_from_bytes(view, bucket.dtype)
        values, at = zeros(self._layout), 0
        for part, bound in zip(self._parts, self._bounds, strict=True):
            if len(view) - at < LENGTH.size:
                raise ProtocolError(f"payload of {len(view)} bytes ends before part {part.tensor.name!r}")
            (size,) = LENGTH.unpack_from(view, at)
            at += LENGTH.size
            if size > min(len(view) - at, bound):
                raise ProtocolError(f"part {part.tensor.name!r} claims {size} bytes; {len(view) - at} are left")
            if size:
                values[part.offset : part.end] = self._decode_part(view[at : at + size], part)
            at += size
        if at != len(view):
            raise ProtocolError(f"payload of {len(view)} bytes has {len(view) - at} after its last part")
        return values

    def _decode_part(self, data: memoryview, part: Part) -> torch.Tensor:
        if part.tensor.name in self._taken:
            return self._codec.decode_part(data, part)
        if len(data) != part.elements * part.dtype.itemsize:
            raise ProtocolError(f"part {part.tensor.name!r}: {len(data)} bytes for {part.elements} elements")
        return tensor_from_bytes(data, part.tensor.dtype)


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
