"""Two bits per value, for minus, zero and plus a scale: TernGrad and MXNet's 2-bit codec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import Memory, Part, Turn
from shardline.codecs.parts import NOT_FINITE, check_setting
from shardline.codecs.quantizing.base import Quantizer, norms, refuse
from shardline.codecs.random import uniforms
from shardline.core.reduce import magnitude
from shardline.core.tensor_bytes import Buffer
from shardline.native import codecs

ZERO, PLUS, MINUS = range(3)
LARGE = 1e30


class _Ternary(Quantizer):
    """A code per value for 0, plus or minus one scale of a part."""

    bits = 2

    def scales(self, part: Part) -> int:
        return 1

    def coded(self, scale: float, chosen: torch.Tensor, values: torch.Tensor) -> Buffer:
        # 1 is PLUS; moved by one bit, it is MINUS.
        codes = chosen.to(torch.uint8) << (values < 0.0).to(torch.uint8)
        return self.joined((scale,), codes.numpy())

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        scales, codes = self.parted(payload, part)
        if codes.max() > MINUS or scales[0] < 0.0:
            raise refuse(part, f"a code is above {MINUS}, or the scale is negative")
        signs = (codes & PLUS).view(np.int8) - (codes >> 1).view(np.int8)
        return torch.from_numpy(signs.astype(np.float32)).mul_(float(scales[0])).to(part.dtype)


@dataclass(frozen=True)
class TernGrad(_Ternary):
    """Minus, zero or plus the largest magnitude, at random and unbiased; values beyond `clip` sigma are clipped first.

    x becomes s sign(x) with the probability |x| / s, otherwise 0, where s is the largest |x| of a quantum of rows (Wen
    et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017, section 3.1).
    Before, x is clipped at `clip` times sigma (section 3.3); clip=0 turns that off. Sigma is the root mean square, for
    which a part of equal values is not clipped to nothing. Each worker has its own s (no scaler sharing).

    Unbiased for the clipped x: E||C||^2 = s ||x||_1. Without clipping the variance bound is omega = sqrt(d) - 1. With
    it, s <= clip ||x|| / sqrt(d), so the mean squared error is at most (clip + 1) ||x||^2, but there is a bias.
    """

    name: ClassVar[str] = "terngrad"
    clip: float = 2.5

    def __post_init__(self) -> None:
        check_setting(self, "clip", 0, LARGE)

    @property
    def is_unbiased(self) -> bool:
        return self.clip == 0.0

    def error_bound(self, elements: int) -> float:
        return math.sqrt(elements) - 1.0 if self.is_unbiased else self.clip + 1.0

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """The largest magnitude, then codes."""
        values = values.float()
        scale = magnitude(values)
        if self.clip:
            scale = min(scale, self.clip * float(norms(values, part.elements)[0]) / math.sqrt(part.elements))
        # Values beyond the scale are always chosen, as those clipped to it would be.
        scale, seed = float(np.float32(scale)), turn.seed_of(part)
        codes = codecs.ternary(values, scale, seed)
        if codes is not None:
            return self.joined((scale,), codes)
        return self.coded(scale, uniforms(seed, part.elements).mul_(scale) < values.abs(), values)


@dataclass(frozen=True)
class TwoBit(_Ternary):
    """Plus the threshold for values above it, minus it for those below its negative, zero between. With error memory.

    The 2-bit gradient compression of MXNet (kvstore, `gradient_compression`), which has an absolute threshold of 0.5:
    that is absolute=true. Gradients are of any size, so by default `threshold` is relative to the mean magnitude of a
    quantum of rows, error memory included, and at most 1: then something is always sent. 1 is near the best for
    normally distributed values; a third of their squared norm is left for later then.

    A contraction with delta >= threshold / d; with absolute=true the error does not grow, but may stay (delta = 0).
    """

    name: ClassVar[str] = "twobit"
    memory = Memory.RESTORED
    threshold: float = 1.0
    absolute: bool = False

    def __post_init__(self) -> None:
        check_setting(self, "threshold", 1e-6, LARGE if self.absolute else 1.0)

    def error_bound(self, elements: int) -> float:
        return 1.0 if self.absolute else 1.0 - self.threshold / elements

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """The threshold as a number, then codes."""
        magnitudes = values.abs()
        unit = 1.0 if self.absolute else float(magnitudes.sum(dtype=torch.float64)) / part.elements
        scale = float(torch.tensor(self.threshold * unit, dtype=torch.float32))
        if not math.isfinite(scale):
            return NOT_FINITE
        return self.coded(scale, magnitudes.float() >= scale, values)
