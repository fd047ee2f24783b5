from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import Part, Turn
from shardline.codecs.parts import NOT_FINITE, check_setting
from shardline.codecs.quantizing.base import Blocked, norms, refuse, rounded, scaled
from shardline.core.tensor_bytes import Buffer

MOST_LEVELS = 127


@dataclass(frozen=True)
class QSGD(Blocked):
    """Unbiased random rounding to `levels` steps of each block's l2 norm, with 2 * levels + 1 codes.

    A value x of a block with the norm n becomes sign(x) * n * l / levels, where l is one of the two integers around
    |x| * levels / n, at random and unbiased (Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", NIPS 2017, section 3.1, buckets as in section 4). Codes have ceil(log2(2 * levels + 1))
    bits: 8 for 127 levels, 4 for 7, 2 for 1. The paper's Elias coding is left out.

    Unbiased, with the variance bound omega = min(block / levels^2, sqrt(block) / levels): lemma 3.1.
    """

    name: ClassVar[str] = "qsgd"
    is_unbiased = True
    levels: int = 127
    block: int = 256

    def __post_init__(self) -> None:
        check_setting(self, "levels", 1, MOST_LEVELS)
        super().__post_init__()

    def error_bound(self, elements: int) -> float:
        size = min(self.block, elements)
        return min(size / self.levels**2, math.sqrt(size) / self.levels)

    @property
    def bits(self) -> int:
        return (2 * self.levels).bit_length()

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """Norms, then level + levels of each value."""
        found = norms(values, self.block)
        if not np.isfinite(found).all():
            return NOT_FINITE
        divisors = torch.from_numpy(found) / self.levels
        codes = rounded(values, divisors, self.block, self.levels, self.levels, turn.seed_of(part))
        return self.joined(found, codes)

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        scales, codes = self.parted(payload, part)
        if codes.max() > 2 * self.levels or scales.min() < 0.0:
            raise refuse(part, f"a code is above {2 * self.levels}, or a norm is negative")
        found = torch.from_numpy(codes.astype(np.float32)).sub_(self.levels)
        return scaled(found, scales / np.float32(self.levels), self.block, part)
