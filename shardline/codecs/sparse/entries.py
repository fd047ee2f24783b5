"""Few entries of a part: choosing the largest, and writing them with their indices. Pure.

Written are the number of entries (4 bytes), the form of the indices (1 byte), the indices in ascending order, the
values. Of three forms the shortest is taken: distances between neighbours in 16 bits (the first from 0), if all fit;
indices in 32 bits; a bitmap.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import torch

from shardline.codecs.base import Part
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.native import codecs

HEADER = struct.Struct("<IB")
GAPS, INDICES, BITMAP = FORMS = range(3)
GAP_BYTES, INDEX_BYTES = 2, 4
LARGEST_GAP = (1 << 16) - 1
EXACT = 1 << 16
"""Parts of up to this many elements are searched for exactly the largest."""
FEWEST, MOST = 0.8, 1.3
"""Share of the wanted number that is near enough in larger parts."""
STRIDE = 31
"""Distance of the elements by which a threshold for larger parts is estimated."""
LOWERED = 0.8
TRIES = 5

Indices = npt.NDArray[np.int64]


def most_entries(count: int, elements: int) -> int:
    return count if elements <= EXACT else min(elements, int(MOST * count))


def fewest_entries(count: int, elements: int) -> int:
    return count if elements <= EXACT else int(FEWEST * count)


def largest(values: npt.NDArray[np.floating], count: int) -> Indices:
    """Ascending indices of the `count` largest magnitudes of finite values, or of about as many beyond EXACT.

    Deterministic. Those returned are always the largest. The threshold for many comes from a sample, and entries are
    selected again if there are too many (Lin et al., "Deep Gradient Compression", ICLR 2018, section 5).
    """
    elements = len(values)
    if elements <= EXACT:
        return _exactly(values, count)
    magnitudes = np.abs(values)
    sample = magnitudes[::STRIDE]
    rank = min(len(sample), max(1, round(count * len(sample) / elements)))
    threshold = float(np.partition(sample, len(sample) - rank)[len(sample) - rank])
    for _ in range(TRIES):
        found = np.flatnonzero(magnitudes >= threshold)
        if len(found) > most_entries(count, elements):
            return found[_exactly(magnitudes[found], count)]
        if len(found) >= fewest_entries(count, elements):
            return found
        threshold *= LOWERED
    return _exactly(magnitudes, count)


def _exactly(values: npt.NDArray[np.floating], count: int) -> Indices:
    """Of equal ones the first."""
    found = codecs.largest(values, count)
    if found is not None:
        return found.astype(np.int64)
    magnitudes, rest = np.abs(values), len(values) - count
    least = np.partition(magnitudes, rest)[rest]
    chosen = magnitudes > least
    equal = np.flatnonzero(magnitudes == least)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def entries_bytes(entries: int, part: Part) -> int:
    """Upper bound for the bytes of as many entries or fewer."""
    index = GAP_BYTES if part.elements <= EXACT else INDEX_BYTES
    return HEADER.size + min(entries * index, _bitmap_bytes(part)) + entries * part.dtype.itemsize


def _bitmap_bytes(part: Part) -> int:
    return -(-part.elements // 8)


def write_entries(values: torch.Tensor, indices: Indices, part: Part) -> Buffer:
    """The entries at ascending indices; zeros among them are left out."""
    chosen = values.numpy()[indices]
    kept = chosen != 0.0
    if not kept.all():
        chosen, indices = chosen[kept], indices[kept]
    form, where = _written(indices, part)
    return b"".join((HEADER.pack(len(indices), form), where, chosen.tobytes()))


def _written(indices: Indices, part: Part) -> tuple[int, bytes]:
    gaps = indices.copy()
    gaps[1:] -= indices[:-1]
    fits = len(gaps) == 0 or int(gaps.max()) <= LARGEST_GAP
    if len(indices) * (GAP_BYTES if fits else INDEX_BYTES) > _bitmap_bytes(part):
        taken = np.zeros(part.elements, np.uint8)
        taken[indices] = 1
        return BITMAP, np.packbits(taken, bitorder="little").tobytes()
    return (GAPS, gaps.astype("<u2").tobytes()) if fits else (INDICES, indices.astype("<u4").tobytes())


def entries_at(payload: memoryview, part: Part) -> Indices:
    count, form = HEADER.unpack_from(payload)
    return _indices(payload[HEADER.size : HEADER.size + _index_bytes(form, count, part)], form, part)


def _index_bytes(form: int, count: int, part: Part) -> int:
    """Bytes of as many indices in a form; 0 if there is no such form."""
    return {GAPS: count * GAP_BYTES, INDICES: count * INDEX_BYTES, BITMAP: _bitmap_bytes(part)}.get(form, 0)


def read_entries(payload: memoryview, most: int, part: Part) -> torch.Tensor:
    """The part, zero where there is no entry. Raises ProtocolError for what write_entries() never makes."""
    name, size = part.tensor.name, part.dtype.itemsize
    if len(payload) < HEADER.size:
        raise ProtocolError(f"part {name!r}: {len(payload)} bytes have no count")
    count, form = HEADER.unpack_from(payload)
    split = HEADER.size + _index_bytes(form, count, part)
    if count > most or form not in FORMS or len(payload) != split + count * size:
        raise ProtocolError(
            f"part {name!r}: {len(payload)} bytes for {count} of {part.elements} entries, at most {most}, form {form}"
        )
    indices = _indices(payload[HEADER.size : split], form, part)
    if len(indices) != count or not _ascend(indices, part.elements):
        raise ProtocolError(f"part {name!r}: indices are not {count} ascending ones within {part.elements} elements")
    found = torch.zeros(part.elements, dtype=part.dtype)
    found.numpy()[indices] = np.frombuffer(payload[split:], found.numpy().dtype)
    return found


def _indices(data: memoryview, form: int, part: Part) -> Indices:
    if form == GAPS:
        return np.cumsum(np.frombuffer(data, "<u2"), dtype=np.int64)
    if form == INDICES:
        return np.frombuffer(data, "<u4").astype(np.int64)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def _ascend(indices: Indices, elements: int) -> bool:
    return len(indices) == 0 or (int(indices[-1]) < elements and bool((indices[1:] > indices[:-1]).all()))
