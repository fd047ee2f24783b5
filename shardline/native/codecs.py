"""The kernels for parts of gradients, as codecs write them. Each says by None that Python has to do it: there is no
library, or the values are none for it (not float32, not plain memory). What they compute has the same bits as Python.

Codes are uint8 arrays, a byte per value. They must be contiguous.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.native.kernels import is_plain
from shardline.native.library import Level, level

Octets = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_Sums = ctypes.c_double * 2


def _address(data: npt.NDArray[Any] | memoryview) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))  # type: ignore[arg-type]  # an array is a buffer
    except TypeError:  # it is read-only
        return int(np.asarray(data).__array_interface__["data"][0])


def _level_for(values: Tensor) -> Level | None:
    kernels = level()
    return kernels if kernels is not None and values.dtype is torch.float32 and is_plain(values) else None


def int8_encode(values: Tensor, block: int) -> Octets | None:
    """Scales, then codes, as shardline.codecs.quantizing.int8 has them; an empty array if a value is not finite."""
    kernels, count = _level_for(values), values.numel()
    if kernels is None:
        return None
    payload = np.empty(4 * -(-count // block) + count, np.uint8)
    finite = kernels.call["int8_encode"](_address(payload), values.data_ptr(), count, block)
    return payload if finite else payload[:0]


def int8_decode(payload: memoryview, count: int, block: int) -> Tensor | None:
    """The float32 values; None also for what int8_encode() does not make. payload: of the right size."""
    kernels = level()
    if kernels is None:
        return None
    values = torch.empty(count)
    address = _address(payload)
    return values if kernels.call["int8_decode"](values.data_ptr(), address, count, block) else None


def pack(codes: Octets, bits: int) -> Octets | None:
    """See shardline.codecs.quantizing.base.pack(). bits: 1 to 7."""
    kernels = level()
    if kernels is None:
        return None
    packed = np.empty(-(-len(codes) * bits // 8), np.uint8)
    kernels.call["pack"](_address(packed), _address(codes), len(codes), bits)
    return packed


def unpack(packed: Octets, bits: int, count: int) -> Octets | None:
    """See shardline.codecs.quantizing.base.unpack(). bits: 1 to 7."""
    kernels = level()
    if kernels is None:
        return None
    codes = np.empty(count, np.uint8)
    kernels.call["unpack"](_address(codes), _address(packed), count, bits)
    return codes


def signs(values: Tensor) -> tuple[Octets, int, float, float] | None:
    """Codes (1 = negative), the number of negatives, their sum, and that of the others; NaN is none of the negatives.

    Sums are those of shardline.codecs.quantizing.base, not finite if a value isn't.
    """
    kernels, count = _level_for(values), values.numel()
    if kernels is None:
        return None
    codes, sums = np.empty(count, np.uint8), _Sums()
    negative = kernels.call["signs"](_address(codes), sums, values.data_ptr(), count)
    return codes, negative, sums[0], sums[1]


def either(codes: Octets, one: float, zero: float) -> Tensor | None:
    """A float32 value for each code, 1 or 0."""
    kernels = level()
    if kernels is None:
        return None
    values = torch.empty(len(codes))
    kernels.call["either"](values.data_ptr(), _address(codes), one, zero, len(codes))
    return values


def without(values: Tensor, codes: Octets, one: float, zero: float) -> Tensor | None:
    """Values minus one of two float32 values by code, a new tensor."""
    kernels = _level_for(values)
    if kernels is None:
        return None
    left = torch.empty_like(values)
    kernels.call["without"](left.data_ptr(), values.data_ptr(), _address(codes), one, zero, len(codes))
    return left


def tops(values: Tensor, block: int) -> Floats | None:
    """The largest magnitude of each block; an empty array if one is not finite."""
    return _of_blocks("tops", values, block)


def norms(values: Tensor, block: int) -> Floats | None:
    """The l2 norm of each block by the sums of shardline.codecs.quantizing.base; an empty array if one isn't finite."""
    return _of_blocks("norms", values, block)


def _of_blocks(name: str, values: Tensor, block: int) -> Floats | None:
    kernels, count = _level_for(values), values.numel()
    if kernels is None:
        return None
    found = np.empty(-(-count // block), np.float32)
    return found if kernels.call[name](_address(found), values.data_ptr(), count, block) else found[:0]


def rounded(values: Tensor, divisors: Floats, block: int, top: int, base: int, seed: int) -> Octets | None:
    """Codes: finite values by the divisors of their blocks, plus a random number, rounded down, from -top to top; plus
    `base`. Random numbers are those of shardline.codecs.random. A quotient has to be an int.
    """
    kernels, count = _level_for(values), values.numel()
    if kernels is None:
        return None
    codes = np.empty(count, np.uint8)
    addresses = (_address(codes), values.data_ptr(), _address(divisors))
    kernels.call["rounded"](*addresses, count, block, top, base, seed)
    return codes


def ternary(values: Tensor, scale: float, seed: int) -> Octets | None:
    """Codes: 0 where a random number times the scale is not below the magnitude, otherwise 1, 2 for negatives."""
    kernels, count = _level_for(values), values.numel()
    if kernels is None:
        return None
    codes = np.empty(count, np.uint8)
    kernels.call["ternary"](_address(codes), values.data_ptr(), scale, count, seed)
    return codes


def largest(values: npt.NDArray[np.floating], wanted: int) -> npt.NDArray[np.uint32] | None:
    """Ascending indices of as many of the largest magnitudes, 1 or more; of equal ones the first. values: finite."""
    kernels = level()
    if kernels is None or values.dtype != np.float32 or not values.flags.c_contiguous or len(values) > 1 << 31:
        return None
    indices = np.empty(len(values), np.uint32)
    kernels.call["largest"](_address(indices), _address(values), len(values), wanted)
    return indices[:wanted]
