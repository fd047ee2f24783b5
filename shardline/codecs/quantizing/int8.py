from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import Part, Turn
from shardline.codecs.parts import NOT_FINITE, check_size
from shardline.codecs.quantizing.base import Blocked, blocks, divided, refuse, rounded, scaled
from shardline.core.tensor_bytes import Buffer
from shardline.native import codecs

TOP = 127


@dataclass(frozen=True)
class Int8(Blocked):
    """8-bit integers times a scale per block of values; a quarter of float32's bytes.

    Each block of `block` values has the scale max|x| / 127, and values are rounded to the nearest multiple of it, or
    (stochastic=true) to one of the two multiples around it, at random and unbiased. The blocks are those of Dettmers et
    al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, section 2.1; here codes are linear.

    An error is at most half a scale (a scale if stochastic). Either way the bound is block / (4 * 127^2), 0.004 for
    256: with stochastic=false a contraction, small enough to need no error memory, otherwise the variance (omega).
    """

    name: ClassVar[str] = "int8"
    block: int = 256
    stochastic: bool = False

    @property
    def is_unbiased(self) -> bool:
        return self.stochastic

    def error_bound(self, elements: int) -> float:
        """Block / (4 * 127^2): max|x|^2 of a block is at most its squared norm."""
        return min(self.block, elements) / (4 * TOP**2)

    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        found = None if self.stochastic else codecs.int8_encode(values, self.block)
        if found is None:
            return super().encode_part(values, part, turn)
        return memoryview(found) if len(found) else NOT_FINITE  # type: ignore[arg-type]  # an array is a buffer

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """Scales, then integers."""
        if self.stochastic:
            tops = codecs.tops(values, self.block)
            largest = blocks(values, self.block).abs().amax(dim=1) if tops is None else torch.from_numpy(tops)
            scales = largest / TOP
            return self.joined(scales.numpy(), rounded(values, scales, self.block, TOP, 0, turn.seed_of(part)))
        rows = blocks(values, self.block)
        scales = rows.abs().amax(dim=1) / TOP
        codes = divided(rows, scales).round_().clamp_(-TOP, TOP).to(torch.int8).view(-1)[: part.elements]
        return self.joined(scales.numpy(), codes.view(torch.uint8).numpy())

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        check_size(payload, self.max_part_bytes(part), part)
        values = codecs.int8_decode(payload, part.elements, self.block)
        if values is not None:
            return values.to(part.dtype)
        scales, codes = self.parted(payload, part)
        integers = codes.view(np.int8)
        if integers.min() < -TOP or scales.min() < 0.0:
            raise refuse(part, "a code is -128, or a scale is negative")
        return scaled(torch.from_numpy(integers.astype(np.float32)), scales, self.block, part)
