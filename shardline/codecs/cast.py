"""Casts: fp16 and bf16 on the wire, the full type on both ends. Halves the bytes; rounds to nearest even."""

from __future__ import annotations

import torch

from shardline.core.spec import DTYPES, itemsize
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError


class CastCodec:
    """Writes floats in a narrower type. Values beyond fp16's range become infinite, which the NaN policy then meets."""

    def __init__(self, name: str, wire_dtype: str) -> None:
        self.name = name
        self._wire_dtype = wire_dtype

    def payload_bytes(self, dtype: str, elements: int) -> int:
        """Two bytes per element."""
        return elements * itemsize(self._wire_dtype)

    def encode(self, values: torch.Tensor) -> Buffer:
        """Bytes of the rounded copy."""
        return tensor_bytes(values.to(DTYPES[self._wire_dtype]))

    def decode(self, payload: Buffer, dtype: str, elements: int) -> torch.Tensor:
        """Widened copy."""
        if len(payload) != self.payload_bytes(dtype, elements):
            raise ProtocolError(f"payload of {len(payload)} bytes for {elements} {self._wire_dtype} elements")
        return tensor_from_bytes(payload, self._wire_dtype).to(DTYPES[dtype])
