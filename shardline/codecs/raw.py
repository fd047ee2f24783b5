"""Raw: the bytes as they are."""

from __future__ import annotations

import torch

from shardline.core.spec import itemsize
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.errors import ProtocolError


class RawCodec:
    """Little-endian bytes of the tensor; bit-exact for every dtype."""

    name = "raw"

    def payload_bytes(self, dtype: str, elements: int) -> int:
        """Elements times itemsize."""
        return elements * itemsize(dtype)

    def encode(self, values: torch.Tensor) -> Buffer:
        """View of the tensor's memory."""
        return tensor_bytes(values)

    def decode(self, payload: Buffer, dtype: str, elements: int) -> torch.Tensor:
        """View of writable bytes, copy of read-only ones."""
        if len(payload) != self.payload_bytes(dtype, elements):
            raise ProtocolError(f"payload of {len(payload)} bytes for {elements} {dtype} elements")
        return tensor_from_bytes(payload, dtype)
