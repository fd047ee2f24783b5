"""Rows of embedding tables on their way: ids beside values, packed in one flat tensor. Pure.

    packed = pack(ids, rows)    # float32 [U * (2 + dim)]: the bytes of U ids (int64, ascending, unique), then U rows

An id is any int64. It belongs to one of a table's PARTS parts by a hash that is the same on every machine; a bucket of
the plan has the ids of a range of parts, so that the plan need not know which ids there are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardline.errors import ProtocolError
from shardline.native import rows as native

PARTS = 1024
"""Parts of a table, which servers share."""
ID_ELEMENTS = 2
"""float32 elements that hold the bytes of an id."""
MOST_BYTES = 1 << 31
"""Bytes of rows in one push, or of one answer, at most."""


def hashed(ids: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """64 mixed bits per id (int64 [U]); Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014."""
    x = ids.numpy().view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    # In place: first values of rows take a hash per element.
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def part_of(ids: Tensor) -> Tensor:
    """The part of a table to which each id (int64 [U]) belongs: int64 [U], 0 to PARTS - 1."""
    return torch.from_numpy((hashed(ids) >> np.uint64(54)).astype(np.int64))


def pack(ids: Tensor, rows: Tensor) -> Tensor:
    """Ids (int64 [U], ascending, unique) and their rows (float32 [U, dim]) in one flat tensor (float32)."""
    return torch.cat([ids.contiguous().view(torch.float32), rows.reshape(-1)])


def count(packed: Tensor, dim: int) -> int:
    """Number of packed rows. Raises ProtocolError if it is not whole."""
    number, rest = divmod(packed.numel(), ID_ELEMENTS + dim)
    if rest:
        raise ProtocolError(
            f"{packed.nbytes} bytes are not whole rows of dim {dim}, {4 * (ID_ELEMENTS + dim)} bytes each"
        )
    return number


def ids_of(packed: Tensor, dim: int) -> Tensor:
    """The ids: int64 [U], a view."""
    return packed[: count(packed, dim) * ID_ELEMENTS].view(torch.int64)


def rows_of(packed: Tensor, dim: int) -> Tensor:
    """The rows: float32 [U, dim], a view."""
    return packed[count(packed, dim) * ID_ELEMENTS :].view(-1, dim)


def check_packed(packed: Tensor, dim: int, first_part: int, parts: int, table: str) -> None:
    """Raise ProtocolError unless the ids are ascending, unique, and in these parts of the table."""
    ids = ids_of(packed, dim)
    if native.check(ids, first_part, parts) == len(ids):
        return
    if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise ProtocolError(f"table {table!r}: the ids of a push are not ascending, or one comes twice")
    owned = part_of(ids) - first_part
    if len(ids) and not bool(((owned >= 0) & (owned < parts)).all()):
        stray = int(ids[(owned < 0) | (owned >= parts)][0])
        raise ProtocolError(f"table {table!r}: id {stray} belongs to another shard")


def summed(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Unique ids, ascending, and for each the sum of its rows in the order given. ids: int64 [N]; rows: [N, dim]."""
    unique, where = torch.unique(ids, return_inverse=True)
    if len(unique) == len(ids):
        order = torch.argsort(ids)
        return ids[order], rows.index_select(0, order)
    first = torch.full((len(unique),), len(ids), dtype=torch.int64)
    first.scatter_reduce_(0, where, torch.arange(len(ids)), "amin")
    # The first row of each id is copied, so that an id that comes once keeps its bits.
    total = rows.index_select(0, first)
    later = torch.ones(len(ids), dtype=torch.bool)
    later[first] = False
    return unique, total.index_add_(0, where[later], rows[later])


def merge(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """Packed sums left + right: an id on one side only keeps its bits, one on both gets left + right."""
    merged = native.merge(left, right, dim, ID_ELEMENTS + dim)
    if merged is None:
        ids = torch.cat([ids_of(left, dim), ids_of(right, dim)])
        merged = pack(*summed(ids, torch.cat([rows_of(left, dim), rows_of(right, dim)])))
    return merged
