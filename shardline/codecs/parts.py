"""Base of codecs that encode each tensor, or each quantum of one, by itself: framing, bounds and error memory.

A payload is, for each part in the order of the bucket, its length (4 bytes, little-endian) and its bytes; a part
without a gradient has no bytes. A payload as long as the bucket is the bucket's own bytes, so none is ever longer.
"""

from __future__ import annotations

import struct
from abc import abstractmethod

import torch

from shardline.codecs.base import Codec, Layout, Memory, MemoryKey, Part, Scope, Turn, zeros
from shardline.core.reduce import is_finite
from shardline.core.spec import DTYPES
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError

LENGTH = struct.Struct("<I")
ERROR = "error"
"""Name of a part's error memory: p - decoded, where p is the numbers plus the previous error."""


class PartCodec(Codec):
    """A codec of parts, optionally with error feedback.

    With error memory (Memory.DROPPED or RESTORED), the error of one encoding is added to the next (Karimireddy et al.,
    "Error Feedback Fixes SignSGD", 2019, algorithm 2).
    """

    scope = Scope.TENSOR
    fixed_size = False

    @abstractmethod
    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """Encode a part's numbers, a flat CPU tensor that must not be written to, in at least one byte.

        NaN and infinity must be preserved as such, somewhere in the part.
        """

    @abstractmethod
    def decode_part(self, payload: Buffer, part: Part) -> torch.Tensor:
        """A part's numbers, flat, in its tensor's dtype. Raises ProtocolError for what encode_part() never makes."""

    def max_part_bytes(self, part: Part) -> int:
        """Upper bound for encode_part(); the part's own bytes if unknown."""
        return part.elements * DTYPES[part.tensor.dtype].itemsize

    def max_bytes(self, layout: Layout) -> int:
        """Upper bound for all parts, at most the bucket's own bytes."""
        parts = layout.parts(self.scope)
        return min(layout.bucket.nbytes, sum(LENGTH.size + self._bound(part) for part in parts))

    def _bound(self, part: Part) -> int:
        own = part.elements * DTYPES[part.tensor.dtype].itemsize
        return self.max_part_bytes(part) if self.takes(part.tensor) else own

    def encoder(self, layout: Layout) -> PartCoder:
        """Encoder that writes part after part."""
        return PartCoder(self, layout)

    def decoder(self, layout: Layout) -> PartCoder:
        """Decoder that reads part after part."""
        return PartCoder(self, layout)


class PartCoder:
    """Encoder and decoder of one bucket."""

    def __init__(self, codec: PartCodec, layout: Layout) -> None:
        self._codec = codec
        self._layout = layout
        self._parts = [part for part in layout.parts(codec.scope) if part.elements]

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        """Bytes of all parts that have a gradient; the new error memory is left in the turn."""
        sums = {part.offset: self._with_memory(values[part.offset : part.end], part, turn) for part in self._parts}
        pieces: list[Buffer] = []
        left: dict[MemoryKey, torch.Tensor] = {}
        for part in self._parts:
            data: Buffer = b""
            if turn.has(part.piece):
                data = self._encode_part(sums[part.offset], part, turn, left)
            pieces += (LENGTH.pack(len(data)), data)
        if sum(len(piece) for piece in pieces) >= self._layout.bucket.nbytes:
            return self._as_it_is(sums, turn, left)
        turn.memory.update(left)
        return b"".join(pieces)

    def _with_memory(self, values: torch.Tensor, part: Part, turn: Turn) -> torch.Tensor:
        error = turn.memory.get((part.tensor.name, part.first_row, ERROR))
        return values if error is None or not turn.has(part.piece) else values + error

    def _encode_part(self, values: torch.Tensor, part: Part, turn: Turn, left: dict[MemoryKey, torch.Tensor]) -> Buffer:
        codec = self._codec
        if not codec.takes(part.tensor):
            return tensor_bytes(values)
        data = codec.encode_part(values, part, turn)
        # A gradient that is not finite skips its step or ends the job; in the error memory it would spoil all later
        # ones.
        if codec.memory is not Memory.NONE and is_finite(values):
            left[part.tensor.name, part.first_row, ERROR] = values - codec.decode_part(data, part)
        return data

    def _as_it_is(self, sums: dict[int, torch.Tensor], turn: Turn, left: dict[MemoryKey, torch.Tensor]) -> Buffer:
        """The bucket unencoded, error memory added, so no error is left."""
        whole = zeros(self._layout)
        for part in self._parts:
            whole[part.offset : part.end] = sums[part.offset]
        turn.memory.update({key: torch.zeros_like(error) for key, error in left.items()})
        return tensor_bytes(whole)

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """Decode all parts."""
        view, bucket = memoryview(payload), self._layout.bucket
        if len(view) == bucket.nbytes:
            return tensor_from_bytes(view, bucket.dtype)
        values, at = zeros(self._layout), 0
        for part in self._parts:
            if len(view) - at < LENGTH.size:
                raise ProtocolError(f"payload of {len(view)} bytes ends before part {part.tensor.name!r}")
            (size,) = LENGTH.unpack_from(view, at)
            at += LENGTH.size
            if size > min(len(view) - at, self._codec._bound(part)):
                raise ProtocolError(f"part {part.tensor.name!r} claims {size} bytes; {len(view) - at} are left")
            if size:
                values[part.offset : part.end] = self._decode_part(view[at : at + size], part)
            at += size
        if at != len(view):
            raise ProtocolError(f"payload of {len(view)} bytes has {len(view) - at} after its last part")
        return values

    def _decode_part(self, data: memoryview, part: Part) -> torch.Tensor:
        if self._codec.takes(part.tensor):
            return self._codec.decode_part(data, part)
        if len(data) != part.elements * DTYPES[part.tensor.dtype].itemsize:
            raise ProtocolError(f"part {part.tensor.name!r}: {len(data)} bytes for {part.elements} elements")
        return tensor_from_bytes(data, part.tensor.dtype)
