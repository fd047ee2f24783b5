"""What quantizing codecs share: a fixed layout of float32 scales followed by packed codes, and blocks of values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shardline.codecs.base import Part
from shardline.codecs.lossy import Lossy, check_size
from shardline.codecs.quantizing.packing import pack, packed_bytes, unpack
from shardline.codecs.random import uniforms
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.native import codecs

Scales = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
SCALE_BYTES = 4


class Quantizer(Lossy):
    """A codec whose payload is float32 scales, then a code of a fixed number of bits per value."""

    @property
    def bits(self) -> int:
        """Bits of one value's code, 1 to 8. A class variable where it doesn't depend on the settings."""
        return 8

    @abstractmethod
    def scales(self, part: Part) -> int:
        """Number of scales of a part."""

    def max_part_bytes(self, part: Part) -> int:
        """The exact size of a part that is finite."""
        return SCALE_BYTES * self.scales(part) + packed_bytes(part.elements, self.bits)

    def joined(self, scales: Sequence[float] | Scales, codes: Codes) -> Buffer:
        """The payload of a part. codes: one per value."""
        return b"".join((np.asarray(scales, "<f4").tobytes(), pack(codes, self.bits)))

    def parted(self, payload: memoryview, part: Part) -> tuple[Scales, Codes]:
        """The scales and codes in a payload. Raises ProtocolError for a wrong size and scales that are not finite."""
        check_size(payload, self.max_part_bytes(part), part)
        count = self.scales(part)
        scales = np.frombuffer(payload, "<f4", count)
        if not np.isfinite(scales).all():
            raise ProtocolError(f"part {part.tensor.name!r}: a scale is not finite")
        return scales, unpack(payload[SCALE_BYTES * count :], self.bits, part.elements)


def refuse(part: Part, what: str) -> ProtocolError:
    """The error for a payload that no encoder makes."""
    return ProtocolError(f"part {part.tensor.name!r}: {what}")


def blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Values as float32 in rows of `size`, the last one filled up with zeros."""
    values, count = values.float(), num_blocks(values.numel(), size)
    if count * size != values.numel():
        filled = values.new_zeros(count * size)
        filled[: values.numel()] = values
        values = filled
    return values.view(count, size)


def num_blocks(elements: int, size: int) -> int:
    """Number of blocks of `size` values."""
    return -(-elements // size)


def divided(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Each row divided by its scale; a row of zeros, whose scale is 0, stays what it is."""
    return rows / scales.masked_fill(scales == 0.0, 1.0)[:, None]


def rounded(
    values: torch.Tensor, divisors: torch.Tensor, size: int, top: int, base: int, seed: int
) -> npt.NDArray[np.uint8]:
    """Codes: values divided by their blocks' divisors, rounded up or down at random without bias, plus `base`.

    Codes are from -top to top; those below 0 are two's complements.
    """
    divisors = divisors.masked_fill(divisors == 0.0, 1.0)
    codes = codecs.rounded(values, divisors.numpy(), size, top, base, seed)
    if codes is not None:
        return codes
    # floor(x + u) rounds negative numbers without bias, too.
    found = (blocks(values, size) / divisors[:, None]).view(-1)[: values.numel()]
    integers = found.add_(uniforms(seed, values.numel())).floor_().clamp_(-top, top).add_(base)
    return integers.to(torch.int16).to(torch.uint8).numpy()


def scaled(values: torch.Tensor, scales: Scales, size: int, part: Part) -> torch.Tensor:
    """Float32 values times the scales of their blocks, in the part's dtype. values: written to."""
    full = part.elements // size
    factors = torch.from_numpy(scales.copy())
    values[: full * size].view(full, size).mul_(factors[:full, None])
    values[full * size :].mul_(factors[-1])
    return values.to(part.dtype)
