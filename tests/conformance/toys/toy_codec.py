"""A third-party codec in one file: sends the largest entries of each tensor and keeps the rest in error memory.

Load it as a plugin and name it: `--codec top:ratio=0.25`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs import CODECS
from shardline.codecs.base import Direction, Memory, Part
from shardline.codecs.parts import PartCodec
from shardline.core.spec import DTYPES
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import JobError, ProtocolError

COUNT = struct.Struct("<I")
INDEX_BYTES = 4


@CODECS.add
@dataclass(frozen=True)
class Top(PartCodec):
    """The largest entries of each tensor, with error memory."""

    name: ClassVar[str] = "top"
    direction = Direction.PUSH
    memory = Memory.DROPPED
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise JobError(f"codec top: ratio is {self.ratio}; give a number above 0 and at most 1")

    def _most(self, part: Part) -> int:
        return math.ceil(self.ratio * part.elements)

    def max_part_bytes(self, part: Part) -> int:
        """A count, and an index and a number per entry."""
        return COUNT.size + self._most(part) * (INDEX_BYTES + DTYPES[part.tensor.dtype].itemsize)

    def encode_part(self, values: torch.Tensor, part: Part, turn: object) -> Buffer:
        """Entries in ascending order of their indices; zeros are omitted, so the size depends on the numbers."""
        # NaN counts as the largest.
        found = torch.topk(values.abs(), self._most(part)).indices.sort().values
        found = found[values[found] != 0.0]
        return b"".join((COUNT.pack(len(found)), tensor_bytes(found.to(torch.int32)), tensor_bytes(values[found])))

    def decode_part(self, payload: Buffer, part: Part) -> torch.Tensor:
        """The entries, and zeros elsewhere."""
        dtype, view = part.tensor.dtype, memoryview(payload)
        if len(view) < COUNT.size:
            raise ProtocolError(f"{part.tensor.name!r}: {len(view)} bytes have no count")
        (count,) = COUNT.unpack_from(view)
        entry = INDEX_BYTES + DTYPES[dtype].itemsize
        if count > self._most(part) or len(view) != COUNT.size + count * entry:
            raise ProtocolError(f"{part.tensor.name!r}: {len(view)} bytes for {count} of {part.elements} entries")
        split = COUNT.size + count * INDEX_BYTES
        # Copies, since 8-byte numbers must be aligned.
        indices = tensor_from_bytes(bytes(view[COUNT.size : split]), "int32").long()
        if count and not (
            int(indices[0]) >= 0 and int(indices[-1]) < part.elements and bool((indices.diff() > 0).all())
        ):
            raise ProtocolError(f"{part.tensor.name!r}: indices are not ascending within {part.elements} elements")
        values = torch.zeros(part.elements, dtype=DTYPES[dtype])
        values[indices] = tensor_from_bytes(bytes(view[split:]), dtype)
        return values
