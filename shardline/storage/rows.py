"""Rows of one embedding table on one server: flat arenas of values and of update rules' states, and slots by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from shardline.core.image import VALUE
from shardline.core.rows import part_of
from shardline.native import rows as native

AT_ONCE = 1 << 16
"""Rows looked at together."""


class SlotsByDict:
    """Slots by id where the native library is not in use; see shardline.native.rows.SlotsByHash."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def find(self, ids: Tensor) -> Tensor:
        return torch.tensor([self._slots.get(key, -1) for key in ids.tolist()], dtype=torch.int64)

    def put(self, ids: Tensor, slots: Tensor) -> None:
        self._slots.update(zip(ids.tolist(), slots.tolist(), strict=True))

    def drop(self, ids: Tensor) -> Tensor:
        return torch.tensor([self._slots.pop(key, -1) for key in ids.tolist()], dtype=torch.int64)

    def items(self) -> tuple[Tensor, Tensor]:
        ids, slots = list(self._slots), list(self._slots.values())
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """About what a dict and its numbers take."""
        return 120 * len(self._slots)


def _arena(capacity: int, width: int) -> Tensor:
    """Numpy's memory, for which it asks for huge pages: rows anywhere in it are read and written a third faster."""
    return torch.from_numpy(np.empty((capacity, width), np.float32))


class RowStore:
    """Rows by id, for one thread at a time. A row keeps its slot, its place in the arenas, until it is removed.

    Arenas double when they are full: memory that no row has used yet is reserved, not taken. `values` and `states` are
    other tensors after an insert() that has made them grow.
    """

    def __init__(self, dim: int, widths: Mapping[str, int]) -> None:
        """widths: float32 elements per row of each state, see shardline.update.rows.RowRule.widths()."""
        self.values = _arena(0, dim)
        """float32 [capacity, dim]; only slots of rows mean anything."""
        self.states: Mapping[str, Tensor] = {name: _arena(0, width) for name, width in widths.items()}
        """By name: float32 [capacity, width]."""
        self._slots = native.slots_by_hash() or SlotsByDict()
        self._used = 0
        """Slots that have been given out, from the first."""
        self._free = torch.empty(0, dtype=torch.int64)
        """Those of removed rows, the next one last."""

    def __len__(self) -> int:
        return self._used - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas, reserved ones included, and of what finds slots."""
        tensors = (self.values, *self.states.values(), self._free)
        return sum(tensor.nbytes for tensor in tensors) + self._slots.nbytes

    @property
    def arenas(self) -> dict[str, Tensor]:
        """Values and states by name."""
        return {VALUE: self.values, **self.states}

    def counts(self) -> dict[str, int]:
        """Fields of a TableStatus about rows on disk; empty without any."""
        return {}

    def find(self, ids: Tensor) -> Tensor:
        """The slot of each id, -1 where there is no row: int64 [U]. ids: int64 [U]."""
        return self._slots.find(ids)

    def look(self, ids: Tensor) -> Tensor:
        """A copy of the values of ids that have rows: float32 [U, dim]. ids: int64 [U]."""
        return self.values.index_select(0, self.find(ids))

    def gather(self, slots: Tensor, rows: Tensor) -> None:
        """Copy values by slot (int64 [U]) into `rows` (float32 [U, dim]); a row without a slot, -1, is left alone."""
        if not native.gather(self.values, slots, rows):
            known = slots >= 0
            rows[known] = self.values[slots[known]]

    def insert(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Add rows with states of zeros; their slots: int64 [U]. ids: int64 [U], distinct, none there; rows: [U, dim].

        Slots of removed rows come first, the last removed one before others.
        """
        kept = max(0, len(self._free) - len(ids))
        reused = self._free[kept:].flip(0)
        end = self._used + len(ids) - len(reused)
        slots = torch.cat([reused, torch.arange(self._used, end)])
        self._reserve(end)
        self._slots.put(ids, slots)
        self._used, self._free = end, self._free[:kept].clone()
        self.values.index_copy_(0, slots, rows)
        for state in self.states.values():
            state.index_fill_(0, slots, 0)
        return slots

    def _reserve(self, capacity: int) -> None:
        if capacity > len(self.values):
            capacity = max(capacity, 2 * len(self.values))
            self.values = self._grown(self.values, capacity)
            self.states = {name: self._grown(state, capacity) for name, state in self.states.items()}

    def _grown(self, arena: Tensor, capacity: int) -> Tensor:
        grown = _arena(capacity, arena.shape[1])
        grown[: self._used] = arena[: self._used]
        return grown

    def remove(self, ids: Tensor) -> None:
        """Remove rows; ids without one are left out. ids: int64 [U]."""
        slots = self._slots.drop(ids)
        self._free = torch.cat([self._free, slots[slots >= 0]])

    def fill(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """As insert(), with states: rows has float32 [U, width] by name."""
        slots = self.insert(ids, rows[VALUE])
        for name, state in self.states.items():
            state[slots] = rows[name]
        return slots

    def pieces(self) -> Iterator[tuple[RowStore, Tensor, Tensor]]:
        """(store, ids, slots) of all rows, some at a time, in any order: ids and slots are int64."""
        ids, slots = self._slots.items()
        for at in range(0, len(ids) or 1, AT_ONCE):
            yield self, ids[at : at + AT_ONCE], slots[at : at + AT_ONCE]

    def ordered(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of all ids (int64 [n]), and of values and states by name, by part and id: the order of checkpoints."""
        ids, slots = self._slots.items()
        order = in_order(ids)
        slots = slots[order]
        return ids[order], {name: arena[slots] for name, arena in self.arenas.items()}


def in_order(ids: Tensor) -> Tensor:
    """The order of ids by part and id: int64 [n]."""
    by_id = np.argsort(ids.numpy())
    parts = part_of(ids).numpy().astype(np.uint16)[by_id]
    return torch.from_numpy(by_id[np.argsort(parts, kind="stable")])
