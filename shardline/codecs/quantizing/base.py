"""What quantizing codecs share: float32 scales followed by packed codes, blocks of values, and sums.

Codes have 1 to 8 bits and are packed without gaps; the first is in the lowest bits of the first byte. Sums are in
float64 and in an order of their own, so that processes with and without the native library write the same bits: value i
is added to lane i mod LANES, one after another; of the lanes, the second half is added to the first until one is left.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from shardline.codecs.base import Codec, Part
from shardline.codecs.parts import Lossy, check_setting, check_size
from shardline.codecs.random import uniforms
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.native import codecs

Codes = npt.NDArray[np.uint8]

_FOLDS = ((1, 8, 0x00FF00FF00FF00FF), (2, 16, 0x0000FFFF0000FFFF), (4, 32, 0x00000000FFFFFFFF))
"""Eight codes as one number become shorter in three steps: codes in a lane, width of a lane, every other lane."""

_WORDS = {2: "<u2", 4: "<u4"}
"""Types of eight codes, by their bits."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of as many codes of so many bits."""
    return -(-count * bits // 8)


def pack(codes: Codes, bits: int) -> Buffer:
    """Packed codes, each below 2**bits. codes: contiguous."""
    if bits == 8:
        return memoryview(codes)  # type: ignore[arg-type]  # an array is a buffer
    if bits == 1:
        return np.packbits(codes, bitorder="little").tobytes()
    packed = codecs.pack(codes, bits)
    if packed is not None:
        return memoryview(packed)  # type: ignore[arg-type]
    words = _padded(codes, 8).view("<u8")
    for each, width, lanes in _FOLDS:
        words = (words & lanes) | ((words >> width & lanes) << (each * bits))
    # The same bytes either way; a cast is faster than a copy of columns.
    short = words.astype(_WORDS[bits]) if bits in _WORDS else words.view(np.uint8).reshape(-1, 8)[:, :bits]
    return short.tobytes()[: packed_bytes(len(codes), bits)]


def unpack(data: Buffer, bits: int, count: int) -> Codes:
    """`count` codes; read-only if bits is 8. data has packed_bytes(count, bits)."""
    octets = np.frombuffer(data, np.uint8)
    if bits == 8:
        return octets
    if bits == 1:
        return np.unpackbits(octets, count=count, bitorder="little")
    codes = codecs.unpack(octets, bits, count)
    if codes is not None:
        return codes
    short = _padded(octets, bits).reshape(-1, bits)
    if bits in _WORDS:
        words = short.view(_WORDS[bits]).astype("<u8")
    else:
        rows = np.zeros((len(short), 8), np.uint8)
        for column in range(bits):
            rows[:, column] = short[:, column]
        words = rows.view("<u8")
    for each, width, _ in reversed(_FOLDS):
        low = (1 << (each * bits)) - 1
        kept = np.uint64(sum(low << shift for shift in range(0, 64, 2 * width)))
        words = (words & kept) | ((words >> (each * bits) & kept) << width)
    return words.view(np.uint8).reshape(-1)[:count]


def _padded(octets: Codes, multiple: int) -> Codes:
    missing = -len(octets) % multiple
    return np.concatenate((octets, np.zeros(missing, np.uint8))) if missing else octets


Scales = npt.NDArray[np.float32]
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


LEAST_BLOCK, MOST_BLOCK = 8, 16_384


class Blocked(Quantizer):
    """A quantizer with a scale for each block of `block` values of a part."""

    block: int

    def __post_init__(self) -> None:
        check_setting(self, "block", LEAST_BLOCK, MOST_BLOCK)

    def scales(self, part: Part) -> int:
        """One for each block; the last one may be shorter."""
        return num_blocks(part.elements, self.block)

    def of_rows(self, dim: int) -> Codec | None:
        """The codec with blocks that begin with rows of dim elements; None if it can't have such blocks."""
        # What is rounded at random depends on the place among all rows.
        if self.is_unbiased or not LEAST_BLOCK <= dim <= MOST_BLOCK:
            return None
        return self if dim % self.block == 0 else replace(self, block=dim)  # type: ignore[type-var]


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


LANES = 128


def lane_sums(rows: torch.Tensor) -> npt.NDArray[np.float64]:
    """The sum of each row of a 2-d tensor, in float64."""
    count, width = rows.shape
    filled = np.zeros((count, -(-width // LANES), LANES))
    filled.reshape(count, -1)[:, :width] = rows.numpy()
    # An axis that is not the last one in memory is added row after row.
    lanes: npt.NDArray[np.float64] = filled.sum(axis=1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def lane_sum(values: torch.Tensor) -> float:
    """The sum of a 1-d tensor."""
    return float(lane_sums(values[None])[0])


def norms(values: torch.Tensor, block: int) -> npt.NDArray[np.float32]:
    """The l2 norm of each block of finite numbers, of any magnitude; infinite if it is too large for float32."""
    found = codecs.norms(values, block)
    if found is not None and len(found):
        return found
    squares = blocks(values, block).double().square_()
    with np.errstate(over="ignore"):
        return np.sqrt(lane_sums(squares)).astype(np.float32)
