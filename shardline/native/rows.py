"""The kernels for rows of embedding tables. What they compute has the same bits as Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardline.native.kernels import is_plain
from shardline.native.library import Level, level

_FIRST = 64
"""Pairs of an empty table."""
_FULL = 0.7


class SlotsByHash:
    """Slots by id: open addressing over a flat array of pairs of an id and its slot, 16 bytes each, 70 % full at most.

    The id's hash (shardline.core.rows.hashed) says where the search begins; the next free pair is taken. A removed id
    leaves no mark: ids behind it move up.
    """

    def __init__(self, kernels: Level) -> None:
        self._call = kernels.call
        self._pairs = np.zeros((_FIRST, 2), np.int64)
        self._count = 0

    def find(self, ids: Tensor) -> Tensor:
        """The slot of each id, -1 where it has none: int64 [U]. ids: int64 [U]."""
        return self._do("find", ids, torch.empty(len(ids), dtype=torch.int64))

    def put(self, ids: Tensor, slots: Tensor) -> None:
        """Give ids that have none a slot each; int64 [U]."""
        self._count += len(ids)
        if self._count > _FULL * len(self._pairs):
            kept = self.items()
            self._pairs = np.zeros((1 << int(self._count / _FULL).bit_length(), 2), np.int64)
            self._do("put", *kept)
        self._do("put", ids, slots)

    def drop(self, ids: Tensor) -> Tensor:
        """As find(); the ids have no slot then."""
        slots = self._do("drop", ids, torch.empty(len(ids), dtype=torch.int64))
        self._count -= int((slots >= 0).sum())
        return slots

    def items(self) -> tuple[Tensor, Tensor]:
        """(ids, slots) in any order; int64."""
        used = self._pairs[self._pairs[:, 1] > 0]
        return torch.from_numpy(used[:, 0].copy()), torch.from_numpy(used[:, 1] - 1)

    @property
    def nbytes(self) -> int:
        return self._pairs.nbytes

    def _do(self, what: str, ids: Tensor, slots: Tensor) -> Tensor:
        ids = ids.contiguous()
        address = self._pairs.__array_interface__["data"][0]
        self._call[f"slots_{what}"](slots.data_ptr(), address, len(self._pairs) - 1, ids.data_ptr(), len(ids))
        return slots


def slots_by_hash() -> SlotsByHash | None:
    """An empty table; None: there is no library."""
    kernels = level()
    return None if kernels is None else SlotsByHash(kernels)


def update(rule: str, arenas: Sequence[Tensor], slots: Tensor, gradients: Tensor, numbers: Sequence[float]) -> bool:
    """Update rows by a rule of shardline.update.rows; whether it was done.

    arenas: values and then states, float32 [capacity, width]; slots: int64 [U], of rows that are there, distinct;
    gradients: float32 [U, dim]; numbers: the rate, then the rule's settings.
    """
    kernels, count = level(), len(arenas)
    if kernels is None or f"rows_{rule}" not in kernels.call or not all(map(is_plain, (*arenas, gradients))):
        return False
    addresses = (ctypes.c_void_p * count)(*(arena.data_ptr() for arena in arenas))
    widths = (ctypes.c_size_t * count)(*(arena.shape[1] for arena in arenas))
    given, slots = (ctypes.c_double * len(numbers))(*numbers), slots.contiguous()
    kernels.call[f"rows_{rule}"](addresses, widths, count, slots.data_ptr(), gradients.data_ptr(), len(slots), given)
    return True


def check(ids: Tensor, first_part: int, parts: int) -> int | None:
    """Number of ids (int64 [U]) before the first that is not ascending or of another part; None: not looked at."""
    kernels, ids = level(), ids.contiguous()
    return None if kernels is None else int(kernels.call["rows_check"](ids.data_ptr(), len(ids), first_part, parts))


def gather(arena: Tensor, slots: Tensor, rows: Tensor) -> bool:
    """Copy rows by slot (int64 [U]), none of a negative slot, into `rows` (float32 [U, dim]); False: not done."""
    kernels, slots = level(), slots.contiguous()
    if kernels is None or not (rows.is_contiguous() and arena.is_contiguous()):
        return False
    kernels.call["rows_gather"](rows.data_ptr(), arena.data_ptr(), slots.data_ptr(), *rows.shape)
    return True


def merge(left: Tensor, right: Tensor, dim: int, row: int) -> Tensor | None:
    """Add packed rows (core.rows), where an id may be in both; None: not done. row: elements of each."""
    kernels = level()
    if kernels is None or not (is_plain(left) and is_plain(right)):
        return None
    given = (left.data_ptr(), left.numel() // row, right.data_ptr(), right.numel() // row, dim)
    count = kernels.call["rows_merge"](None, 0, *given)
    merged = torch.empty(count * row)
    kernels.call["rows_merge"](merged.data_ptr(), count, *given)
    return merged


def first_values(kind: str, ids: Tensor, dim: int, start: int, scale: float) -> Tensor | None:
    """First values (float32 [U, dim]) of shardline.update.rows.inits; None: not made. start: 64 bits of the table."""
    kernels = level()
    if kernels is None or f"first_{kind}" not in kernels.call:
        return None
    ids, rows = ids.contiguous(), torch.empty(len(ids), dim)
    kernels.call[f"first_{kind}"](rows.data_ptr(), ids.data_ptr(), len(ids), dim, start, scale)
    return rows
