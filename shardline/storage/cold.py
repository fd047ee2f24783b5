"""Rows of a table of which only some are in memory; the others are in a file on the server's disk.

The file is scratch: it has no name, ends with its process, and is never waited for. Checkpoints are what lasts.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardline.core.image import VALUE
from shardline.core.spec import TensorSpec
from shardline.errors import DiskError, UsageError
from shardline.storage.rows import RowStore, in_order

_FIRST_BYTES = 1 << 20
"""Of a file, about; it grows by a quarter."""
_WINDOW, _LOOKED = 8, 1024
"""Slots that are looked at for each row to be written out, and in all at least."""
_SHARE = 32
"""Part of the rows in memory that is written out together."""
_NEVER = np.iinfo(np.int64).max


def check(tensors: Sequence[TensorSpec], folder: Path) -> None:
    """Raise UsageError if a table wants rows on disk, and the folder can't be written."""
    for table in tensors:
        if table.memory_rows:
            try:
                RowFile(folder, table.name, 1).insert(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1))
            except DiskError as error:
                raise UsageError(str(error)) from error


class RowFile(RowStore):
    """Records by id in a file that is mapped to memory: only the places of ids are in memory.

    Raises DiskError, naming table and folder, where the disk is full or fails.
    """

    def __init__(self, folder: Path, table: str, width: int) -> None:
        """width: float32 elements of a record."""
        super().__init__(width, {})
        self._folder, self._table, self._fd = folder, table, -1

    @property
    def nbytes(self) -> int:
        return super().nbytes - self.values.nbytes

    def _reserve(self, capacity: int) -> None:
        """Take more of the disk: a full one refuses here, not where its memory is written."""
        if capacity <= len(self.values):
            return
        width = self.values.shape[1]
        capacity = max(capacity, len(self.values) * 5 // 4, _FIRST_BYTES // (4 * width))
        try:
            if self._fd < 0:
                # Nothing of it is left when the process ends, however it does.
                self._fd, path = tempfile.mkstemp(prefix="shardline-rows-", dir=self._folder)
                weakref.finalize(self, os.close, self._fd)
                os.unlink(path)
            os.posix_fallocate(self._fd, 0, 4 * width * capacity)
            mapped = mmap.mmap(self._fd, 4 * width * capacity)
        except OSError as error:
            raise DiskError(
                f"table {self._table!r} can't keep rows beyond its memory_rows in {self._folder}, where they take "
                f"{self.values.nbytes:,} bytes: {error.strerror}. Make room there, choose another folder with "
                "--cold-dir, or raise memory_rows; a run that has a checkpoint goes on from it with --resume"
            ) from error
        mapped.madvise(mmap.MADV_RANDOM)
        self.values = torch.from_numpy(np.frombuffer(mapped, np.float32).reshape(capacity, width))


class ColdRows(RowStore):
    """Rows by id, about `memory_rows` of them in memory: those used last. A row is brought there by find().

    A slot of find() is that row's until the next find(), which may ask for more rows than memory_rows: those are in
    memory together.
    """

    def __init__(self, dim: int, widths: Mapping[str, int], memory_rows: int, file: RowFile) -> None:
        super().__init__(dim, widths)
        self._dim, self._widths, self._most, self._file = dim, widths, memory_rows, file
        self._now = self._hand = 0
        self._ids = self._last = np.empty(0, np.int64)
        """By slot: the id, and when it was last used."""
        self.hits = self.misses = 0
        """Rows that find() had in memory, and brought there."""

    def __len__(self) -> int:
        return super().__len__() + len(self._file)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._ids.nbytes + self._last.nbytes + self._file.nbytes

    def counts(self) -> dict[str, int]:
        found = {"memory_hits": self.hits, "memory_misses": self.misses}
        return {**found, "disk_rows": len(self._file), "disk_bytes": self._file.values.nbytes}

    def find(self, ids: Tensor) -> Tensor:
        slots = super().find(ids)
        self._now += 1
        absent = torch.nonzero(slots < 0).view(-1)
        if not len(absent):
            self._last[slots.numpy()] = self._now
            self.hits += len(ids)
            return slots
        self._last[slots[slots >= 0].numpy()] = self._now
        self.hits += len(ids) - len(absent)
        places = self._file.find(ids[absent])
        there = places >= 0
        if bool(there.any()):
            absent, places = absent[there], places[there]
            records = torch.empty(len(absent), self._file.values.shape[1])
            self._file.gather(places, records)
            slots[absent] = super().fill(ids[absent], self._split(records))
            self._file.remove(ids[absent])
            self.misses += len(absent)
        return slots

    def insert(self, ids: Tensor, rows: Tensor) -> Tensor:
        self._make_room(len(ids))
        slots = super().insert(ids, rows)
        if len(self._ids) < len(self.values):
            grown = len(self.values) - len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros(grown, np.int64)])
            self._last = np.concatenate([self._last, np.full(grown, _NEVER)])
        self._ids[slots.numpy()], self._last[slots.numpy()] = ids.numpy(), self._now
        return slots

    def fill(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """As in a RowStore; rows for which memory has no room go to the disk, and their slots are -1."""
        room = max(0, self._most - super().__len__())
        slots = super().fill(ids[:room], {name: value[:room] for name, value in rows.items()})
        self._file.insert(ids[room:], torch.cat([rows[name][room:] for name in self.arenas], 1))
        return torch.cat([slots, torch.full((len(ids) - len(slots),), -1)])

    def _split(self, records: Tensor) -> dict[str, Tensor]:
        widths = {VALUE: self._dim, **self._widths}
        return dict(zip(widths, torch.split(records, list(widths.values()), 1), strict=True))

    def _make_room(self, wanted: int) -> None:
        """Write out rows that were used longest ago, of those that are looked at: a part of all, one after another."""
        over = super().__len__() + wanted - self._most
        if over <= 0 or not self._used:
            return
        number = max(over, self._most // _SHARE)
        window = self._last[self._hand : min(self._used, self._hand + max(_WINDOW * number, _LOOKED))]
        number = min(number, int((window < self._now).sum()))
        slots = self._hand + np.argpartition(window, max(0, number - 1))[:number]
        self._hand = (self._hand + len(window)) % self._used
        if len(slots):
            ids, where = torch.from_numpy(self._ids[slots]), torch.from_numpy(slots)
            self._file.insert(ids, torch.cat([arena[where] for arena in self.arenas.values()], 1))
            super().remove(ids)
            self._last[slots] = _NEVER

    def remove(self, ids: Tensor) -> None:
        slots = super().find(ids)
        self._last[slots[slots >= 0].numpy()] = _NEVER
        super().remove(ids)
        self._file.remove(ids)

    def look(self, ids: Tensor) -> Tensor:
        rows, slots, places = torch.empty(len(ids), self._dim), super().find(ids), self._file.find(ids)
        self.gather(slots, rows)
        rows[places >= 0] = self._file.values[places[places >= 0], : self._dim]
        return rows

    def pieces(self) -> Iterator[tuple[RowStore, Tensor, Tensor]]:
        yield from super().pieces()
        for file, ids, places in self._file.pieces():
            piece = RowStore(self._dim, self._widths)
            yield piece, ids, piece.fill(ids, self._split(file.values[places]))

    def ordered(self) -> tuple[Tensor, dict[str, Tensor]]:
        ids = torch.cat([some for _, some, _ in self.pieces()])
        order, place = in_order(ids), torch.empty(len(ids), dtype=torch.int64)
        place[order] = torch.arange(len(ids))
        widths, at = {VALUE: self._dim, **self._widths}, 0
        rows = {name: torch.empty(len(ids), width) for name, width in widths.items()}
        for store, some, slots in self.pieces():
            where = place[at : (at := at + len(some))]
            for name, arena in store.arenas.items():
                rows[name][where] = arena[slots]
        return ids[order], rows
