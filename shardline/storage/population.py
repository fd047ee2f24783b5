"""The ids of a table that have rows in one bucket: admission, the cap, eviction. PROTOCOL 1.4.10."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from shardline.core.plan import Slice
from shardline.core.rows import PARTS, part_of
from shardline.core.spec import TensorSpec
from shardline.storage.rows import RowStore
from shardline.update.rows import ROW_ADMISSIONS, ROW_EVICTIONS
from shardline.update.rows.turnover import TOUCHED

BELOW_ADMISSION, CAP = "below_admission", "cap"

log = logging.getLogger("shardline.table")


def filter_width(table: TensorSpec) -> int:
    """Bytes that a table's admission keeps for each of its parts; 0 = nothing."""
    return ROW_ADMISSIONS.parse(table.admit or "always").width


class Population:
    """Says which ids get a row and which rows are removed: the bits of any number of servers, since each part is alone.

    Every part of the table has its own counters, and its own share of `max_rows`.
    """

    def __init__(self, table: TensorSpec, piece: Slice) -> None:
        self._table, self._piece = table.name, piece
        self._admission = ROW_ADMISSIONS.parse(table.admit or "always")
        self._eviction = ROW_EVICTIONS.parse(table.evict or "never")
        self._most = table.max_rows
        ends = np.arange(piece.first_row, piece.first_row + piece.rows + 1) * table.max_rows // PARTS
        self._shares = np.diff(ends)
        self.refused = Counter({BELOW_ADMISSION: 0, CAP: 0})
        """Gradients dropped so far of ids without a row, by reason; of this process."""
        self.evicted = 0
        self.begin(torch.empty(0, dtype=torch.int64), None)

    def begin(self, ids: Tensor, counters: Tensor | None) -> None:
        """Go on with these ids (int64 [n]), and an image's counters (uint8, flat); None = nothing is counted yet."""
        self._rows = self._by_part(ids)
        shape = self._piece.rows, self._admission.width
        # Memory that no id has used is reserved, not taken.
        self._counters = np.zeros(shape, np.uint8)
        if counters is not None:
            self._counters[:] = counters.numpy().reshape(shape)

    @property
    def nbytes(self) -> int:
        return self._counters.nbytes

    def counters(self) -> Tensor | None:
        """A copy of the admission's counters, flat, for an image; None if it has none."""
        return torch.from_numpy(self._counters.reshape(-1).copy()) if self._counters.size else None

    def _parts(self, ids: Tensor) -> Tensor:
        return part_of(ids) - self._piece.first_row

    def _by_part(self, ids: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Number of ids in each part, where there is a cap."""
        return np.bincount(self._parts(ids if self._most else ids[:0]), minlength=self._piece.rows)

    def admit(self, ids: Tensor, step: int) -> Tensor:
        """The ids that get a row: bool [U]. ids: int64 [U], ascending, with a gradient in this step, without a row."""
        parts = self._parts(ids if self._most or self._counters.size else ids[:0])
        admitted = self._admission.admits(self._table, ids, step, parts, self._counters)
        self.refused[BELOW_ADMISSION] += len(ids) - int(admitted.sum())
        if self._most:
            wanted = parts[admitted].numpy()
            room = _rank(wanted) < (self._shares - self._rows)[wanted]
            self._rows += np.bincount(wanted[room], minlength=self._piece.rows)
            admitted[admitted.clone()] = torch.from_numpy(room)
            if not room.all():
                self._full(len(room) - int(room.sum()), step)
        return admitted

    def _full(self, number: int, step: int) -> None:
        if not self.refused[CAP]:
            log.warning(
                "table %r has no room for some new ids (max_rows=%d): from step %d on they get no row, and their "
                "gradients are dropped, until rows are evicted; rows that exist are trained as before. Raise max_rows, "
                'or choose evict="age"',
                self._table,
                self._most,
                step,
            )
        self.refused[CAP] += number

    def touch(self, store: RowStore, slots: Tensor, step: int) -> None:
        """Note that rows had a gradient in a step. slots: int64 [U]."""
        if TOUCHED in self._eviction.states:
            store.states[TOUCHED].view(torch.int32)[slots] = step

    def leaving(self, store: RowStore, step: int) -> Tensor:
        """The ids whose rows are to be removed at the end of a step: int64 [n], ascending."""
        if not self._eviction.due(step):
            return torch.empty(0, dtype=torch.int64)
        found = [ids[self._eviction.evicts(held, slots, step)] for held, ids, slots in store.pieces()]
        gone = torch.cat(found).sort().values
        self._rows -= self._by_part(gone)
        self.evicted += len(gone)
        return gone


def _rank(parts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Number of equal elements before each one."""
    order = np.argsort(parts, kind="stable")
    ordered = parts[order]
    ranks = np.empty_like(parts)
    ranks[order] = np.arange(len(parts)) - np.searchsorted(ordered, ordered)
    return ranks
