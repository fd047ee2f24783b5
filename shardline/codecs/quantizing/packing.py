"""Codes of 1 to 8 bits, packed without gaps; the first code is in the lowest bits of the first byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardline.core.tensor_bytes import Buffer
from shardline.native import codecs

Codes = npt.NDArray[np.uint8]

_FOLDS = ((1, 8, 0x00FF00FF00FF00FF), (2, 16, 0x0000FFFF0000FFFF), (4, 32, 0x00000000FFFFFFFF))
"""Eight codes as one number become shorter in three steps: codes in a lane, width of a lane, every other lane."""

_WORDS = {2: "<u2", 4: "<u4"}
"""Types of eight codes, by their bits."""


def packed_bytes(count: int, bits: int) -> int:
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
