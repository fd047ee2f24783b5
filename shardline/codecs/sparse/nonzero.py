"""Entries that are not zero, exactly: for gradients of large embeddings, and for parameters that few of them change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import Direction, Fidelity, Part, Turn
from shardline.codecs.parts import PartCodec
from shardline.codecs.sparse.entries import read_entries, write_entries
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes

_SAME_SIZE = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class Sparse(PartCodec):
    """Exact: the entries that are not zero and where they are, in each tensor in which that takes fewer bytes.

    As topk writes its entries. A zero with a sign is an entry, so no bit is lost.
    """

    name: ClassVar[str] = "sparse"
    fidelity: ClassVar[Fidelity] = Fidelity.EXACT
    direction = Direction.PUSH

    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        bits = values.view(_SAME_SIZE[part.dtype])
        data = write_entries(bits, np.flatnonzero(bits.numpy()), part)
        return data if len(data) < part.elements * part.dtype.itemsize else bytes(tensor_bytes(values))

    def decode_part(self, payload: Buffer, part: Part) -> torch.Tensor:
        if len(payload) == part.elements * part.dtype.itemsize:
            return tensor_from_bytes(bytearray(payload), part.tensor.dtype)
        return read_entries(memoryview(payload), part.elements, part)
