from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs.base import Codec, Fidelity, Layout, Turn, check_length
from shardline.core.spec import TensorSpec
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes


@dataclass(frozen=True)
class Raw(Codec):
    """Unencoded: each number as it is in memory."""

    name: ClassVar[str] = "raw"
    fidelity: ClassVar[Fidelity] = Fidelity.VIEW

    def takes(self, tensor: TensorSpec) -> bool:
        return True

    def sizes(self, layout: Layout) -> tuple[int, int]:
        return layout.bucket.nbytes, layout.bucket.nbytes

    def coder(self, layout: Layout) -> RawCoder:
        return RawCoder(layout)


class RawCoder:
    """Little-endian bytes of the tensor; bit-exact for every dtype."""

    def __init__(self, layout: Layout) -> None:
        self._bucket = layout.bucket

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        return tensor_bytes(values)

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """A view of writable bytes, a copy of read-only ones."""
        bucket = self._bucket
        check_length(payload, bucket.nbytes, bucket.elements, bucket.dtype)
        return tensor_from_bytes(payload, bucket.dtype)
