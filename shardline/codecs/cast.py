"""Casts: fp16 and bf16 in transfer, the full type on both ends. Halves float32's bytes; rounds to nearest even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardline.codecs.base import Codec, Layout, Turn, check_length
from shardline.core.spec import DTYPES, itemsize
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes
from shardline.native import kernels


class Cast(Codec):
    """Encodes floats in a narrower type."""

    wire_dtype: ClassVar[str]

    def sizes(self, layout: Layout) -> tuple[int, int]:
        nbytes = layout.bucket.elements * itemsize(self.wire_dtype)
        return nbytes, nbytes

    def stays_finite(self, magnitude: float) -> bool:
        return bool(torch.tensor(magnitude, dtype=torch.float64).to(DTYPES[self.wire_dtype]).isfinite())

    def coder(self, layout: Layout) -> CastCoder:
        return CastCoder(layout, self.wire_dtype)


@dataclass(frozen=True)
class Bf16(Cast):
    """Rounded to bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire_dtype: ClassVar[str] = "bfloat16"


@dataclass(frozen=True)
class Fp16(Cast):
    """Rounded to float16: half the bytes, 11 bits of precision; beyond 65,504 it becomes infinite."""

    name: ClassVar[str] = "fp16"
    wire_dtype: ClassVar[str] = "float16"


class CastCoder:
    """Encoder and decoder of one bucket. Values beyond the wire type's range become infinite."""

    def __init__(self, layout: Layout, wire_dtype: str) -> None:
        self._bucket = layout.bucket
        self._wire_dtype = wire_dtype
        self._nbytes = layout.bucket.elements * itemsize(wire_dtype)

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        return tensor_bytes(cast(values, self._wire_dtype))

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        check_length(payload, self._nbytes, self._bucket.elements, self._wire_dtype)
        return cast(tensor_from_bytes(payload, self._wire_dtype), self._bucket.dtype)


def cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """The values in another dtype of core.spec.DTYPES, rounded to nearest even; a copy unless it is theirs."""
    found = kernels.cast(values, DTYPES[dtype])
    return values.to(DTYPES[dtype]) if found is None else found
