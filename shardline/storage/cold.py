"""Rows of a table of which only some are in memory; the others are on the server's disk, in LMDB.

What is on disk is scratch: a file without a name, which ends with its process, and is never waited for. Checkpoints are
what lasts.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardline.core.image import VALUE
from shardline.core.spec import TensorSpec
from shardline.errors import DiskError, UsageError
from shardline.storage.rows import AT_ONCE, RowStore, in_order

if TYPE_CHECKING:
    import lmdb

T = TypeVar("T")

_FIRST_BYTES = 1 << 20
"""Of a file, at least; it grows by a quarter."""
_WINDOW, _LOOKED = 8, 1024
"""Slots that are looked at for each row to be written out, and in all at least."""
_SHARE = 32
"""Part of the rows in memory that is written out together."""
_NEVER = np.iinfo(np.int64).max


def check(tensors: Sequence[TensorSpec], folder: Path) -> None:
    """Raise UsageError if a table wants rows on disk, and LMDB is missing or the folder can't be written."""
    for table in tensors:
        if table.memory_rows:
            try:
                RowFile(folder, table.name, 1).make()
            except DiskError as error:
                raise UsageError(str(error)) from error


class RowFile:
    """Records of one size on disk, by id. The file is made with the first record; its space is taken before its use.

    Raises DiskError, naming table and folder, where the disk is full or fails.
    """

    def __init__(self, folder: Path, table: str, width: int) -> None:
        """width: float32 elements of a record."""
        self._folder, self._table, self._width = folder, table, width
        self._env: lmdb.Environment | None = None
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are taken of the disk."""
        return self._bytes

    def get(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(found, records): bool [U], and float32 [n, width] of those found, in their order. ids: int64 [U]."""
        if self._env is None:
            return torch.zeros(len(ids), dtype=torch.bool), torch.empty(0, self._width)
        with self._env.begin(buffers=True) as txn:
            held = list(map(txn.get, _keys(ids)))
            found = torch.tensor([record is not None for record in held], dtype=torch.bool)
            return found, self._records(filter(None, held))

    def put(self, ids: Tensor, records: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Write records (float32 [U, width]), also in the place of others. ids: int64 [U], distinct."""
        if not len(ids):
            return
        order = np.argsort(ids.numpy().view(np.uint64))
        values = records[order].view(f"V{4 * self._width}").ravel().tolist()
        pairs = list(zip(_keys(ids[torch.from_numpy(order)]), values, strict=True))
        self._write(lambda txn: txn.cursor().putmulti(pairs))

    def drop(self, ids: Tensor) -> Tensor:
        """Remove records; which there were: bool [U]. ids: int64 [U]."""
        keys = _keys(ids) if self._env is not None else []
        dropped = self._write(lambda txn: list(map(txn.delete, keys))) if keys else [False] * len(ids)
        return torch.tensor(dropped, dtype=torch.bool)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, records) of all, some at a time: int64 [n], float32 [n, width]."""
        if self._env is not None:
            with self._env.begin(buffers=True) as txn:
                pairs = iter(txn.cursor())
                while some := list(islice(pairs, AT_ONCE)):
                    ids = np.frombuffer(b"".join(key for key, _ in some), ">i8").astype(np.int64)
                    yield torch.from_numpy(ids), self._records(record for _, record in some)

    def _records(self, found: Iterable[Any]) -> Tensor:
        return torch.from_numpy(np.frombuffer(bytearray(b"".join(found)), np.float32).reshape(-1, self._width))

    def _write(self, change: Callable[[lmdb.Transaction], T]) -> T:
        import lmdb

        env = self._env or self.make()
        try:
            while True:
                try:
                    with env.begin(write=True) as txn:
                        return change(txn)
                except lmdb.MapFullError:
                    self._grow(env)
        except (OSError, lmdb.Error) as error:
            raise self._failed(error) from error

    def make(self) -> lmdb.Environment:
        """Make the file. Raises UsageError without LMDB."""
        try:
            import lmdb
        except ImportError as error:
            raise UsageError(
                f"table {self._table!r} has memory_rows, for which its servers need a package that is missing: "
                "pip install 'shardline[cold]'"
            ) from error
        try:
            fd, path = tempfile.mkstemp(prefix="shardline-rows-", dir=self._folder)
            try:
                self._fd = fd
                weakref.finalize(self, os.close, fd)
                env = lmdb.open(
                    path,
                    map_size=_FIRST_BYTES,
                    subdir=False,
                    lock=False,
                    readahead=False,
                    writemap=True,
                    map_async=True,
                    sync=False,
                    metasync=False,
                    meminit=False,
                )
            finally:
                # Nothing of it is left when the process ends, however it does.
                os.unlink(path)
            self._grow(env)
            self._env = env
        except (OSError, lmdb.Error) as error:
            raise self._failed(error) from error
        return env

    def _grow(self, env: lmdb.Environment) -> None:
        """Take more of the disk: a full one refuses here, not where its memory is written."""
        size = self._bytes + max(_FIRST_BYTES, self._bytes // 4)
        os.posix_fallocate(self._fd, 0, size)
        env.set_mapsize(size)
        self._bytes = size

    def _failed(self, error: Exception) -> DiskError:
        text = getattr(error, "strerror", None) or str(error)
        return DiskError(
            f"table {self._table!r} can't keep rows beyond its memory_rows in {self._folder}, where they take "
            f"{self._bytes:,} bytes: {text}. Make room there, choose another folder with --cold-dir, or raise "
            "memory_rows; a run that has a checkpoint goes on from it with --resume"
        )


def _keys(ids: Tensor) -> list[bytes]:
    keys: list[bytes] = ids.numpy().astype(">i8").view("V8").tolist()
    return keys


class ColdRows(RowStore):
    """Rows by id, about `memory_rows` of them in memory: those used last. A row is brought there by find().

    A slot of find() is that row's until the next find(), which may ask for more rows than memory_rows: those are in
    memory together. Rows in memory may have an old record on disk.
    """

    def __init__(self, dim: int, widths: Mapping[str, int], memory_rows: int, file: RowFile) -> None:
        super().__init__(dim, widths)
        self._dim, self._widths, self._most, self._file = dim, widths, memory_rows, file
        self._count = self._now = self._hand = 0
        self._ids = self._last = np.empty(0, np.int64)
        """By slot: the id, and when it was last used."""
        self.hits = self.misses = 0
        """Rows that find() had in memory, and brought there."""

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._ids.nbytes + self._last.nbytes

    @property
    def disk_rows(self) -> int:
        """Rows that are on disk only."""
        return self._count - super().__len__()

    def counts(self) -> dict[str, int]:
        found = {"memory_hits": self.hits, "memory_misses": self.misses}
        return {**found, "disk_rows": self.disk_rows, "disk_bytes": self._file.nbytes}

    def find(self, ids: Tensor) -> Tensor:
        slots = super().find(ids)
        self._now += 1
        there = slots >= 0
        known = slots[there]
        self._last[known.numpy()] = self._now
        self.hits += len(known)
        if len(known) < len(ids) and self.disk_rows:
            absent = ids[~there]
            found, records = self._file.get(absent)
            self.misses += len(records)
            there[~there] = found
            slots[there & (slots < 0)] = self._admit(absent[found], records)
        return slots

    def insert(self, ids: Tensor, rows: Tensor) -> Tensor:
        self._make_room(len(ids))
        slots = super().insert(ids, rows)
        self._count += len(ids)
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
        self._file.put(ids[room:], np.concatenate([rows[name][room:].numpy() for name in self.arenas], 1))
        self._count += len(ids) - len(slots)
        return torch.cat([slots, torch.full((len(ids) - len(slots),), -1)])

    def _admit(self, ids: Tensor, records: Tensor) -> Tensor:
        """Bring rows into memory again; their slots."""
        slots = super().fill(ids, self._split(records))
        self._count -= len(ids)
        return slots

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
            ids = torch.from_numpy(self._ids[slots])
            self._file.put(ids, np.concatenate([arena.numpy()[slots] for arena in self.arenas.values()], 1))
            super().remove(ids)
            self._last[slots] = _NEVER

    def remove(self, ids: Tensor) -> None:
        slots = super().find(ids)
        there = slots >= 0
        self._last[slots[there].numpy()] = _NEVER
        super().remove(ids)
        self._count -= int((there | self._file.drop(ids)).sum())

    def look(self, ids: Tensor) -> Tensor:
        slots = super().find(ids)
        rows = torch.empty(len(ids), self._dim)
        self.gather(slots, rows)
        _, records = self._file.get(ids[slots < 0])
        rows[slots < 0] = records[:, : self._dim]
        return rows

    def pieces(self) -> Iterator[tuple[RowStore, Tensor, Tensor]]:
        yield from super().pieces()
        for ids, records in self._file.chunks():
            cold = super().find(ids) < 0
            piece = RowStore(self._dim, self._widths)
            yield piece, ids[cold], piece.fill(ids[cold], self._split(records[cold]))

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
