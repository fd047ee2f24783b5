"""Base of codecs that encode each tensor, or each quantum of one, by itself: framing, bounds and error memory.

A payload is, for each part in the order of the bucket, its length (4 bytes, little-endian) and its bytes; a part
without a gradient has no bytes. A payload as long as the bucket is the bucket's own bytes, so none is ever longer.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from shardline.codecs.base import Codec, Layout, Memory, Part, Scope, Turn, zeros
from shardline.core.reduce import is_finite
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError

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
