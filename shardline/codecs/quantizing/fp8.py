from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from shardline.codecs.base import Part, Turn
from shardline.codecs.quantizing.base import Blocked, blocks, divided, refuse, scaled
from shardline.core.tensor_bytes import Buffer
from shardline.errors import JobError


@dataclass(frozen=True)
class _Kind:
    dtype: torch.dtype
    mantissa: int
    """Bits of it that are stored."""
    least: int
    """Exponent of the smallest number above 0."""

    @property
    def top(self) -> float:
        return torch.finfo(self.dtype).max


KINDS = {
    "e4m3": _Kind(torch.float8_e4m3fn, 3, -9),
    "e5m2": _Kind(torch.float8_e5m2, 2, -16),
}


@dataclass(frozen=True)
class FP8(Blocked):
    """8-bit floats times a scale per block of values (kind=e4m3: 3 bits of mantissa, e5m2: 2 and more range).

    Each block of `block` values has the scale max|x| / the largest float8, so that its range is used; values are
    rounded to the nearest float8. The formats are those of Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
    section 3; their scale of a tensor is one per block here.

    Unlike int8's, errors are relative: at most 2^-4 of a value (e4m3) or 2^-3 (e5m2), unless it is less than 2^-14
    (2^-29) of the block's largest. A contraction: 1 - delta is 2^-8 (2^-6) and next to nothing for those tiny values,
    small enough to need no error memory.
    """

    name: ClassVar[str] = "fp8"
    kind: str = "e4m3"
    block: int = 256

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise JobError(f"codec fp8: kind is {self.kind!r}; give one of {', '.join(KINDS)}")
        super().__post_init__()

    def error_bound(self, elements: int) -> float:
        """Half a unit in the last place of each value, squared, and half the smallest number for tinier ones."""
        kind = KINDS[self.kind]
        tiny = 2.0 ** (kind.least - 1) / kind.top
        return float(4.0 ** -(kind.mantissa + 1) + min(self.block, elements) * tiny**2)

    def write(self, values: torch.Tensor, part: Part, turn: Turn) -> Buffer:
        """Scales, then floats."""
        kind, rows = KINDS[self.kind], blocks(values, self.block)
        scales = rows.abs().amax(dim=1) / kind.top
        codes = divided(rows, scales).clamp_(-kind.top, kind.top).to(kind.dtype).view(torch.uint8)
        return self.joined(scales.numpy(), codes.view(-1)[: part.elements].numpy())

    def read(self, payload: memoryview, part: Part) -> torch.Tensor:
        scales, codes = self.parted(payload, part)
        found = _values(self.kind)[codes]
        if scales.min() < 0.0 or not np.isfinite(found).all():
            raise refuse(part, "a value is not finite, or a scale is negative")
        return scaled(torch.from_numpy(found), scales, self.block, part)


@functools.cache
def _values(kind: str) -> npt.NDArray[np.float32]:
    """The number that each code stands for; looking it up is faster than torch's conversion of e4m3."""
    found: npt.NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(KINDS[kind].dtype).float().numpy()
    return found
