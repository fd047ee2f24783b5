"""Rows of embedding tables in a checkpoint: by id, by part, or as the weight of an nn.Embedding.

checkpoint.rows("users", ids)                                        # float32 [U, dim]
nn.Embedding.from_pretrained(dense(checkpoint, "users", 100_000))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardline.checkpoint.content import STATE, stored_dtype
from shardline.checkpoint.stored import StoredRows
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import Slice
from shardline.core.rows import PARTS, part_of
from shardline.core.spec import TensorSpec
from shardline.errors import CheckpointError
from shardline.storage.population import filter_width
from shardline.storage.table import FILTER, IDS, row_widths
from shardline.update.rows import ROW_INITS
from shardline.update.rows.turnover import TOUCHED

_LEAST_ID = torch.iinfo(torch.int64).min


class StoredTable:
    """One table. Each file has the rows of a range of its parts, in the order of parts and ids, mapped to memory."""

    def __init__(
        self, where: Path, spec: TensorSpec, firsts: Sequence[int], held: Mapping[tuple[str, str], Sequence[StoredRows]]
    ) -> None:
        """firsts: the first part of each range. held: what files have of it, by first part.

        Raises CheckpointError, naming the table, unless these are the ids, values and states of its rule.
        """
        self.spec = spec
        self._firsts = torch.tensor(firsts)
        self._init = ROW_INITS.parse(spec.init)
        widths = row_widths(spec)
        forms = {IDS: ("int64", ()), **{name: (spec.dtype, (width,)) for name, width in widths.items()}}
        if counters := filter_width(spec):
            forms[FILTER] = "uint8", (counters,)
        kinds = {name: (VALUE, "") if name == VALUE else (STATE, name) for name in forms}
        parts = torch.diff(torch.tensor([*firsts, PARTS])).tolist()
        if stray := held.keys() - set(kinds.values()):
            name = min(state or what for what, state in stray)
            raise CheckpointError(
                f"{where} has {name!r} of table {spec.name!r}, which rule {spec.rule!r} does not keep"
            )
        for name, kind in kinds.items():
            entries = held.get(kind, ())
            if [entry.first_row for entry in entries] != list(firsts):
                missing = sorted({*firsts} - {entry.first_row for entry in entries})
                raise CheckpointError(
                    f"{where} has not {name!r} of all parts of table {spec.name!r}: those from parts {missing} on are "
                    "missing"
                )
            for entry, ids, number in zip(entries, held[STATE, IDS], parts, strict=True):
                shape = (number if name == FILTER else ids.rows, *forms[name][1])
                dtype = stored_dtype(forms[name][0])
                if (entry.shape, entry.dtype) != (shape, dtype):
                    raise CheckpointError(
                        f"{entry.file.path}: {entry.key!r} is {entry.dtype} {entry.shape}; rule {spec.rule!r} of dim "
                        f"{spec.row_elements} needs {dtype} {shape}"
                    )
        self._pieces = [
            {name: held[kind][number].mapped() for name, kind in kinds.items()} for number in range(len(firsts))
        ]

    def __len__(self) -> int:
        """Number of stored rows."""
        return sum(map(len, self.column(IDS)))

    def column(self, name: str) -> Iterator[Tensor]:
        """IDS (int64 [n]), VALUE (float32 [n, dim]) or a state of all rows, in the order of parts and ids."""
        return (piece[name] for piece in self._pieces)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, stored): float32 [U, dim] and bool [U]; rows that are not stored are as `init` makes them."""
        parts = part_of(ids)
        file_of = torch.searchsorted(self._firsts, parts, right=True) - 1
        rows, stored = torch.empty(len(ids), self.spec.row_elements), torch.zeros(len(ids), dtype=torch.bool)
        for number, piece in enumerate(self._pieces):
            mine = torch.nonzero(file_of == number).view(-1)
            if not len(piece[IDS]) or not len(mine):
                continue
            at = _places(piece[IDS], parts[mine], ids[mine]).clamp_(max=len(piece[IDS]) - 1)
            same = piece[IDS][at] == ids[mine]
            rows[mine[same]] = piece[VALUE][at[same]]
            stored[mine[same]] = True
        rows[~stored] = self._init.rows(self.spec.name, ids[~stored], self.spec.row_elements)
        return rows, stored

    def dense(self, rows: int) -> Tensor:
        """Rows of ids 0 to rows - 1: float32 [rows, dim]."""
        return self.find(torch.arange(rows))[0]

    def image(self, head: BucketImage, bucket: Slice, wanted: TensorSpec) -> BucketImage:
        """`head` filled with the rows of a bucket's parts. Raises CheckpointError for another dim or rule's states.

        Admission and eviction may be other ones than before: an id's steps, and a row's age, are counted from here.
        """
        ours, theirs = row_widths(self.spec), row_widths(wanted)
        if ours | {TOUCHED: 1} != theirs | {TOUCHED: 1}:
            raise CheckpointError(
                f"table {wanted.name!r} has rule {self.spec.rule!r} and rows of {ours} elements in the checkpoint, "
                f"{wanted.rule!r} and {theirs} in the plan"
            )
        ends = torch.tensor([bucket.first_row, bucket.first_row + bucket.rows])
        found: dict[str, list[Tensor]] = {name: [] for name in (IDS, *theirs) if name == IDS or name in ours}
        for piece in self._pieces:
            start, stop = _places(piece[IDS], ends, torch.full((2,), _LEAST_ID)).tolist()
            for name, parts in found.items():
                parts.append(piece[name][start:stop].reshape(-1))
        tensors = {name: torch.cat(parts) for name, parts in found.items()}
        if TOUCHED in theirs and TOUCHED not in ours:
            tensors[TOUCHED] = torch.full((len(tensors[IDS]),), head.step, dtype=torch.int32).view(torch.float32)
        if counters := filter_width(wanted):
            tensors[FILTER] = self._counters(bucket, counters)
        return dataclasses.replace(head, tensors=tensors)

    def _counters(self, bucket: Slice, width: int) -> Tensor:
        """What the admission has counted of a bucket's parts: uint8, flat; zeros where it had another width."""
        if filter_width(self.spec) != width:
            return torch.zeros(bucket.rows * width, dtype=torch.uint8)
        starts = (bucket.first_row - self._firsts).tolist()
        held = [
            piece[FILTER][max(0, start) : max(0, start + bucket.rows)]
            for start, piece in zip(starts, self._pieces, strict=True)
        ]
        return torch.cat(held).view(-1)


def _places(stored: Tensor, parts: Tensor, ids: Tensor) -> Tensor:
    """Where each (part, id) is or would be in stored ids, of which few are read: int64 [U].

    stored: int64 [n], in the order of parts and ids; parts, ids: int64 [U].
    """
    # In numpy: torch would share these few operations among threads, which takes longer.
    held, part, wanted = stored.numpy(), parts.numpy(), ids.numpy()
    low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(held))
    while (low < high).any():
        middle = (low + high) // 2
        there = held[np.minimum(middle, len(held) - 1)]
        found = part_of(torch.from_numpy(there)).numpy()
        after = (low < high) & ((found < part) | ((found == part) & (there < wanted)))
        low, high = np.where(after, middle + 1, low), np.where(after, high, middle)
    return torch.from_numpy(low)
