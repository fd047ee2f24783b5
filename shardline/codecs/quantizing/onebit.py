"""One bit per value with error memory: 1-bit SGD and EF-SignSGD."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shardline.codecs.base import Memory, Part, Turn
from shardline.codecs.parts import ERROR, NOT_FINITE
from shardline.codecs.quantizing.base import Quantizer, lane_sum, refuse
from shardline.core.tensor_bytes import Buffer
from shardline.native import codecs


class _Signs(Quantizer):
    """A bit per value, whether it is negative."""

    memory = Memory.RESTORED
    bits = 1

    def error_bound(self, elements: int) -> float:
        """1 - 1 / d, reached by a vector with a single number; see the codec for the error of a given one."""
        return 1.0 - 1.0 / elements

    @abstractmethod
    def pair(self, scales: Sequence[float], part: Part) -> tuple[float, float]:
        """What negatives and others become. Raises ProtocolError for scales that no encoder makes."""

    @abstractmethod
    def means(self, elements: int, negative: int, below: float, above: float) -> tuple[float, ...]:
        """The scales, from the number of negatives, their sum, and that of the others."""

    def encode_part(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        found = codecs.signs(values)
        if found is None:
            return super().encode_part(values, part, turn)
        codes, negative, below, above = found
        if not math.isfinite(above - below):
            return NOT_FINITE
        return self.joined(self.means(part.elements, negative, below, above), codes)

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """The scales, then a bit per value."""
        negative = values.numpy() < 0.0
        below, above = lane_sum(values.clamp(max=0.0)), lane_sum(values.clamp(min=0.0))
        means = self.means(part.elements, int(np.count_nonzero(negative)), below, above)
        return self.joined(means, negative.view(np.uint8))

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        """One of two values for each bit."""
        scales, negative = self.parted(payload, part)
        one, zero = self.pair(scales.tolist(), part)
        values = codecs.either(negative, one, zero)
        if values is not None:
            return values if part.dtype is torch.float32 else values.to(part.dtype)
        first, second = (torch.tensor(value, dtype=part.dtype) for value in (one, zero))
        return torch.where(torch.from_numpy(negative.view(np.bool_)), first, second)

    def remembered(
        self, values: torch.Tensor, wanted: torch.Tensor, data: Buffer | None, part: Part, turn: Turn
    ) -> Mapping[str, torch.Tensor]:
        """See PartCodec; in one pass."""
        if data is not None and len(data) > len(NOT_FINITE):
            scales, negative = self.parted(memoryview(data), part)
            left = codecs.without(wanted, negative, *self.pair(scales.tolist(), part))
            if left is not None:
                return {ERROR: left}
        return super().remembered(values, wanted, data, part, turn)


@dataclass(frozen=True)
class OneBit(_Signs):
    """The sign of each value; negatives become their mean, the others theirs. With error memory.

    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
    DNNs", Interspeech 2014, section 3, with the reconstruction values per quantum of rows instead of per column. A
    part's mean is kept.

    A contraction, with delta = (n- m-^2 + n+ m+^2) / ||p||^2 >= ||p||_1^2 / (d ||p||^2) >= 1 / d, where n-, m- are the
    number and the mean of the negatives, n+, m+ those of the others.
    """

    name: ClassVar[str] = "onebit"

    def scales(self, part: Part) -> int:
        """The mean of the negatives, and of the others."""
        return 2

    def means(self, elements: int, negative: int, below: float, above: float) -> tuple[float, ...]:
        return below / max(1, negative), above / max(1, elements - negative)

    def pair(self, scales: Sequence[float], part: Part) -> tuple[float, float]:
        below, above = scales
        if below > 0.0 or above < 0.0:
            raise refuse(part, f"the means are {below} and {above}; the first is of negatives")
        return below, above


@dataclass(frozen=True)
class EFSign(_Signs):
    """The sign of each value times the mean magnitude. With error memory.

    C(p) = (||p||_1 / d) sign(p): Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", ICML 2019, algorithm 1 and lemma 8, per quantum of rows. The learning rate stays on the server: p is a
    gradient, not a step.

    A contraction, with delta = ||p||_1^2 / (d ||p||^2) exactly, at least 1 / d.
    """

    name: ClassVar[str] = "ef-sign"

    def scales(self, part: Part) -> int:
        return 1

    def means(self, elements: int, negative: int, below: float, above: float) -> tuple[float, ...]:
        return ((above - below) / elements,)

    def pair(self, scales: Sequence[float], part: Part) -> tuple[float, float]:
        (mean,) = scales
        if mean < 0.0:
            raise refuse(part, f"the mean magnitude is {mean}")
        return -mean, mean
