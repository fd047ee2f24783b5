"""A bucket of a table: the rows of a range of its parts, by id, at `step` and at the step before. PROTOCOL 1.4.10."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardline import schedule as schedules
from shardline.core.contributions import Contributions, Partial, scaled
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import BucketSpec, Slice
from shardline.core.push_context import TOGETHER, PushContext
from shardline.core.rows import PARTS, ids_of, merge, pack, part_of, rows_of
from shardline.core.spec import ScheduleSpec, TensorSpec
from shardline.errors import CheckpointError, ProtocolError
from shardline.storage.bucket import Bucket
from shardline.storage.cold import ColdRows, RowFile
from shardline.storage.population import Population, filter_width
from shardline.storage.rows import AT_ONCE, RowStore
from shardline.update import BucketRule
from shardline.update.rows import ROW_EVICTIONS, ROW_INITS, ROW_RULES

IDS = "ids"
"""Name of the ids among an image's tensors."""
FILTER = "filter"
"""Of what the table's admission counts, uint8 by part: only with an admission that counts."""


def row_widths(table: TensorSpec) -> dict[str, int]:
    """float32 elements of a row, by name: its values, and each state of the table's rule and eviction."""
    states = ROW_RULES.parse(table.rule).widths(table.row_elements)
    return {VALUE: table.row_elements, **states, **ROW_EVICTIONS.parse(table.evict or "never").states}


def check_image(image: BucketImage, table: TensorSpec, piece: Slice) -> None:
    """Raise CheckpointError unless an image has ids of these parts, in order, and all that the rule keeps of a row."""
    ids, widths = image.tensors.get(IDS, torch.empty(0)), row_widths(table)
    where, counters = f"shard {image.shard}, table {table.name!r}", filter_width(table)
    needed = {*widths, IDS, *([FILTER] if counters else [])}
    if ids.dtype is not torch.int64 or {*image.tensors} != needed:
        raise CheckpointError(
            f"{where}: the image has {', '.join(sorted(image.tensors))}; rule {table.rule} needs "
            f"{', '.join(sorted(needed))}"
        )
    held = image.tensors.get(FILTER, torch.empty(0, dtype=torch.uint8))
    if held.numel() != piece.rows * counters or held.dtype is not torch.uint8:
        raise CheckpointError(
            f"{where}: {held.numel()} counters of {piece.rows} parts; admission {table.admit} has {counters} of each"
        )
    for name, width in widths.items():
        held = image.tensors[name]
        if held.numel() != len(ids) * width or held.dtype is not torch.float32:
            raise CheckpointError(f"{where}: {held.numel()} numbers of {name!r} for {len(ids)} rows of {width} each")
    parts = part_of(ids) - piece.first_row
    if len(ids) and not bool(((parts >= 0) & (parts < piece.rows)).all()):
        raise CheckpointError(f"{where}: the image has rows of other parts of the table")
    ahead = (parts[1:] > parts[:-1]) | ((parts[1:] == parts[:-1]) & (ids[1:] > ids[:-1]))
    if not bool(ahead.all()):
        raise CheckpointError(f"{where}: the rows are not in the order of parts and ids, or one comes twice")


class TableBucket(Bucket):
    """Rows that have had a gradient, and their optimizer state. Any other row is what the table's `init` says.

    Rows are updated in place. Of the last update it keeps the rows as they were before, so that theta_{step-1} can be
    pulled, and theta_step while an update waits for the standby.
    """

    def __init__(
        self,
        shard: int,
        number: int,
        spec: BucketSpec,
        tensors: Sequence[TensorSpec],
        schedule: ScheduleSpec,
        *,
        contributions: Contributions,
        keeps_previous: bool,
        cold: Path | None = None,
    ) -> None:
        """keeps_previous: rows of theta_{step-1} can be pulled too. cold: folder for rows beyond the table's
        memory_rows; None = all are in memory.
        """
        nothing = torch.empty(0)
        super().__init__(
            shard, number, spec, tensors, lambda device: None, contributions=contributions, pub=(nothing, nothing)
        )
        self._tensor = tensor = tensors[spec.slices[0].tensor]
        self.table, self.dim = tensor.name, tensor.row_elements
        self._schedule = schedule
        self._rows_rule, self._init = ROW_RULES.parse(tensor.rule), ROW_INITS.parse(tensor.init)
        self._undoes = keeps_previous
        self._holds = 0
        """The step whose rows the store has: `step`, or one more while an update waits for the standby."""
        self.population, self._cold = Population(tensor, spec.slices[0]), cold
        self._clear()

    def _clear(self) -> None:
        self.store = self._empty()
        self._before = torch.empty(0)
        """Packed rows that the last update has changed, as they were; empty if it has changed none."""
        self._changed = torch.empty(0, dtype=torch.int64)
        """Their slots."""

    def _empty(self) -> RowStore:
        widths = row_widths(self._tensor)
        size, dim, (piece,) = sum(widths.values()), widths.pop(VALUE), self.spec.slices
        if self._cold is None or not self._tensor.memory_rows:
            return RowStore(dim, widths)
        first, end = (
            part * self._tensor.memory_rows // PARTS for part in (piece.first_row, piece.first_row + piece.rows)
        )
        return ColdRows(dim, widths, end - first, RowFile(self._cold, self.table, size))

    def initialize(self, values: torch.Tensor) -> bool:
        """Note that the job has begun; rows come into being with their first gradient. values: no rows."""
        fresh, self.initialized = not self.initialized, True
        return fresh

    def counts(self) -> dict[str, Any]:
        """Fields of a TableStatus. Takes no lock."""
        counts = {"rows": len(self.store), "evicted": self.population.evicted, **self.population.refused}
        return {"table": self.table, **counts, **self.store.counts()}

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + self._before.nbytes + self.population.nbytes

    # Updates

    def compute(
        self, total: Partial, *, scale: float = 1.0, skip: bool = False, context: PushContext = TOGETHER
    ) -> bool:
        self.overwritten = self.step - 1
        self._before, self._changed = self._before[:0], self._changed[:0]
        changed = not skip and total.values is not None
        if changed:
            self._update(scaled(total, scale))
        evicted = not skip and self._evict()
        self._holds = self.step + 1
        return changed or evicted

    def _update(self, total: Partial) -> None:
        packed = total.values
        assert packed is not None
        ids = ids_of(packed, self.dim)
        slots = self.store.find(ids)
        new = slots < 0
        if bool(new.any()):
            kept = ~new
            kept[new] = self.population.admit(ids[new], self.step)
            if not bool(kept.all()):
                ids, slots, new = ids[kept], slots[kept], new[kept]
                packed = pack(ids, rows_of(packed, self.dim)[kept])
            slots[new] = self.store.insert(ids[new], self._init.rows(self.table, ids[new], self.dim))
        if self._undoes:
            self._before = torch.empty_like(packed)
            ids_of(self._before, self.dim).copy_(ids)
            self.store.gather(slots, rows_of(self._before, self.dim))
        factor = schedules.factor(self._schedule, self.step)
        self._changed = slots
        self._rows_rule.apply(self.store, slots, rows_of(packed, self.dim), factor=factor)
        self.population.touch(self.store, slots, self.step)

    def _evict(self) -> bool:
        """Remove the rows that the table's eviction names; their last values are among those before the update."""
        ids = self.population.leaving(self.store, self.step)
        if not len(ids):
            return False
        if self._undoes:
            others = ids[~torch.isin(ids, ids_of(self._before, self.dim))]
            self._before = merge(self._before, pack(others, self.store.look(others)), self.dim)
        self.store.remove(ids)
        return True

    # Reading

    def rows(self, ids: torch.Tensor, step: int) -> torch.Tensor:
        """Rows (float32 [U, dim]) for any ids (int64 [U]) at `step`, or the step before. The lock must be held."""
        slots, found = self.store.find(ids), torch.empty(len(ids), self.dim)
        self.store.gather(slots, found)
        new = slots < 0
        if bool(new.any()):
            found[new] = self._init.rows(self.table, ids[new], self.dim)
        if step < self._holds and len(self._before):
            changed = ids_of(self._before, self.dim)
            at = torch.searchsorted(changed, ids).clamp_(max=len(changed) - 1)
            undone = changed[at] == ids
            found[undone] = rows_of(self._before, self.dim)[at[undone]]
        return found

    def values_at(self, step: int) -> torch.Tensor:
        """What the last update made of its rows, flat, for comparison with a standby."""
        return self.store.values.index_select(0, self._changed).view(-1)

    @property
    def values(self) -> torch.Tensor:
        return self.values_at(self.step)

    def previous(self) -> torch.Tensor | None:
        """Rows as they were before the last update, packed; None if theta_{step-1} was never published here."""
        return None if self.step <= self.oldest else self._before

    # Images

    def image(self) -> BucketImage:
        """A copy of all rows and their state, in the order of parts and ids."""
        ids, rows = self.store.ordered()
        tensors = {IDS: ids, **{name: value.view(-1) for name, value in rows.items()}}
        if (counters := self.population.counters()) is not None:
            tensors[FILTER] = counters
        return BucketImage(
            shard=self.shard,
            bucket=self.number,
            step=self.step,
            version=self.version,
            tensors=tensors,
            counted=tuple(self.counted),
        )

    def rule_of(self, image: BucketImage) -> BucketRule | None:
        """Check that an image fits; tables have no BucketRule. Raises CheckpointError."""
        check_image(image, self._tensor, self.spec.slices[0])
        return None

    def restore(self, image: BucketImage, rule: BucketRule | None, *, previous: torch.Tensor | None = None) -> None:
        self._clear()
        ids = image.tensors[IDS]
        rows = {name: image.tensors[name].view(len(ids), arena.shape[1]) for name, arena in self.store.arenas.items()}
        for at in range(0, len(ids), AT_ONCE):
            some = slice(at, at + AT_ONCE)
            self.store.fill(ids[some], {name: value[some] for name, value in rows.items()})
        self.population.begin(ids, image.tensors.get(FILTER))
        self._holds = image.step
        if previous is not None:
            lost = bool((self.store.find(ids_of(previous, self.dim)) < 0).any())
            if lost and not self._tensor.evict:
                raise ProtocolError(f"bucket {self.number}: the step before its own has rows that its own lacks")
            self._before = previous.clone()
        self.restored(image, with_previous=previous is not None)
