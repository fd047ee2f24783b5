"""Layers over embedding tables whose rows are on the parameter servers.

    users = shardline.EmbeddingTable("users", dim=64, rule="rowwise-adagrad:lr=0.05")
    layer = shardline.nn.EmbeddingBag(users, mode="mean")      # as torch.nn.EmbeddingBag, for ids of any int64 value

A table is no parameter of the model: it has no fixed number of rows. A pass pulls the rows that its ids name, and their
gradients are pushed. Several layers may share a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional

from shardline.core.rows import PARTS, pack, summed
from shardline.errors import JobError
from shardline.update.rows import (
    ROW_ADMISSIONS,
    ROW_EVICTIONS,
    ROW_INITS,
    ROW_RULES,
    Admission,
    Eviction,
    RowInit,
    RowRule,
)

MOST_ROWS = 1 << 40
"""Of a table: more than all machines have memory for."""


def flat_ids(table: str, ids: Tensor) -> Tensor:
    """Ids of any shape as int64 [N], on the CPU. Raises JobError unless they are integers that int64 has."""
    if not isinstance(ids, Tensor) or ids.dtype not in _ID_DTYPES:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise JobError(f"table {table!r}: ids are {kind}; they must be a tensor of integers, such as ids.long()")
    return ids.detach().reshape(-1).to("cpu", torch.int64)


_ID_DTYPES = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32}


class RowSource(Protocol):
    """Whoever has the rows of tables: the servers, a checkpoint, this process."""

    def rows(self, wanted: Sequence[tuple[EmbeddingTable, Tensor]]) -> Sequence[Tensor]:
        """Rows (float32 [U, dim]) of each table's unique ids (int64 [U]), on the CPU; they belong to the caller."""


class InitialRows:
    """Rows of tables that nobody has trained."""

    def rows(self, wanted: Sequence[tuple[EmbeddingTable, Tensor]]) -> Sequence[Tensor]:
        return [ROW_INITS.parse(table.init).rows(table.name, ids, table.dim) for table, ids in wanted]


FetchRows = Callable[[str, Tensor], Tensor]
"""Rows (float32 [U, dim]) of a table, by its name and ids (int64 [U])."""


class FetchedRows:
    """Rows of a checkpoint, table by table, as a RowSource."""

    def __init__(self, fetch: FetchRows) -> None:
        self._fetch = fetch

    def rows(self, wanted: Sequence[tuple[EmbeddingTable, Tensor]]) -> list[Tensor]:
        return [self._fetch(table.name, ids) for table, ids in wanted]


class EmbeddingTable(nn.Module):
    """A table of embeddings by id: any int64, with no limit to their number.

    name: unique in the model; checkpoints keep the rows under it. rule: updates the rows that had a gradient, and no
    others; see docs/tables.md. init: the values of a row before its first gradient, a function of its id alone.
    num_ids: ids are below it and not negative, which is checked; None = any. admit: which ids get a row; the others'
    gradients are dropped, and they stay as `init` says. evict: which rows are removed. max_rows: rows at most, of which
    each of the table's 1,024 parts has an equal share; where it is full, new ids get none. None = any number.
    memory_rows: rows that are in the servers' memory, about; others are on their disks. None = all.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        rule: str | RowRule = "rowwise-adagrad",
        init: str | RowInit = "uniform",
        num_ids: int | None = None,
        admit: str | Admission = "always",
        evict: str | Eviction = "never",
        max_rows: int | None = None,
        memory_rows: int | None = None,
    ) -> None:
        """Raises JobError for an unknown rule, init, admission or eviction, a dim below 1, or rows below 1,024."""
        super().__init__()
        if not name or dim < 1:
            raise JobError(f"table {name!r} has dim {dim}; a table has a name, and a dim of at least 1")
        self.name, self.dim, self.num_ids = name, dim, num_ids
        self.rule = str(ROW_RULES.parse(rule, f"table {name!r}: rule"))
        self.init = str(ROW_INITS.parse(init, f"table {name!r}: init"))
        self.admit = str(ROW_ADMISSIONS.parse(admit, f"table {name!r}: admit"))
        self.evict = str(ROW_EVICTIONS.parse(evict, f"table {name!r}: evict"))
        for what, rows in (("max_rows", max_rows), ("memory_rows", memory_rows)):
            if rows is not None and (type(rows) is not int or not PARTS <= rows <= MOST_ROWS):
                raise JobError(
                    f"table {name!r} has {what}={rows!r}; its {PARTS} parts share them: give a whole number from "
                    f"{PARTS} to {MOST_ROWS}, or None for any number"
                )
        self.max_rows, self.memory_rows = max_rows, memory_rows
        self.source: RowSource = InitialRows()
        self.placeholder = torch.empty(PARTS, dim, device="meta")
        """Stands for the rows among the model's tensors."""
        self._used: list[tuple[Tensor, Tensor]] = []
        """Ids and rows of the passes since the last take()."""

    def extra_repr(self) -> str:
        bounds = f"admit={self.admit!r}, evict={self.evict!r}, max_rows={self.max_rows}, memory_rows={self.memory_rows}"
        return f"{self.name!r}, dim={self.dim}, rule={self.rule!r}, init={self.init!r}, {bounds}"

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (float32 [U, dim]) of the unique ids of an int tensor of any shape, and the place of each id among them.

        Both are on the ids' device. The rows take a gradient, where gradients are enabled. Raises JobError naming an id
        that is none.
        """
        return look_up_all([(self, ids)])[0]

    def _unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The unique ids (int64 [U], on the CPU), and the place of each id among them."""
        flat = flat_ids(self.name, ids)
        unique, places = torch.unique(flat, return_inverse=True)
        if self.num_ids is not None and len(unique) and not 0 <= unique[0] <= unique[-1] < self.num_ids:
            wrong = unique[0] if unique[0] < 0 else unique[-1]
            raise JobError(f"table {self.name!r}: id {int(wrong)} is not within 0 to {self.num_ids - 1} (num_ids)")
        return unique, places.view(ids.shape).to(ids.device)

    def _lend(self, unique: Tensor, rows: Tensor) -> Tensor:
        """Have the rows of unique ids take a gradient, for take()."""
        if torch.is_grad_enabled():
            self._used.append((unique, rows.requires_grad_()))
        return rows

    def take(self) -> Tensor | None:
        """The gradients of all rows that passes have used since the last call, packed (core.rows); None without any.

        A row that several passes, or layers, have used gets the sum, in their order.
        """
        used, self._used = self._used, []
        parts = [(ids, rows.grad.detach().cpu()) for ids, rows in used if rows.grad is not None and len(ids)]
        if len(parts) < 2:
            return pack(*parts[0]) if parts else None
        return pack(*summed(torch.cat([ids for ids, _ in parts]), torch.cat([gradient for _, gradient in parts])))

    def clear_gradients(self) -> None:
        """Drop the gradients since the last take(), as zero_grad() does; passes that go on may still bring theirs."""
        for _, rows in self._used:
            rows.grad = None

    def forget(self) -> None:
        """Drop what passes have used: their step is given up."""
        self._used = []


class Embedding(nn.Module):
    """torch.nn.Embedding over a table: int ids of any shape [...] give float32 [..., dim]."""

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        rows, places = self.table.look_up(ids)
        return _rows_at(places, rows).view(*places.shape, self.table.dim)


def _rows_at(places: Tensor, rows: Tensor) -> Tensor:
    """Rows (float32 [N, dim]) at places (int of N elements). On a CPU index_select's backward pass takes less time."""
    return rows.index_select(0, places.view(-1)) if rows.is_cpu else functional.embedding(places.view(-1), rows)


class EmbeddingBag(nn.Module):
    """torch.nn.EmbeddingBag over a table: the sum, mean or max of the rows of each bag of ids.

    ids: int [B, N], or [N] with the bags' first places in `offsets`, as in torch. Gives float32 [B, dim].
    per_sample_weights: of the ids' shape, for mode "sum".
    """

    def __init__(self, table: EmbeddingTable, mode: str = "mean", *, include_last_offset: bool = False) -> None:
        super().__init__()
        self.table, self.mode, self.include_last_offset = table, _checked_mode(mode), include_last_offset

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows, places = self.table.look_up(ids)
        more = {"per_sample_weights": per_sample_weights, "include_last_offset": self.include_last_offset}
        return _bags(places, rows, offsets, self.mode, **more)


def _checked_mode(mode: str) -> str:
    if mode not in ("sum", "mean", "max"):
        raise JobError(f"mode is {mode!r}; it must be 'sum', 'mean' or 'max'")
    return mode


def _bags(places: Tensor, rows: Tensor, offsets: Tensor | None, mode: str, **more: Any) -> Tensor:
    """Torch's embedding_bag. Bags of one id are the rows, whose backward pass is a third as long."""
    if offsets is None and places.shape[1:] == (1,) and more.get("per_sample_weights") is None:
        return _rows_at(places, rows)
    return functional.embedding_bag(places, rows, offsets, mode=mode, **more)


@_disable_dynamo
def look_up_all(wanted: Sequence[tuple[EmbeddingTable, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """EmbeddingTable.look_up() of several tensors of ids, with one pull for all tables that are at the same servers."""
    if not wanted:
        return []
    found = [(table, *table._unique(ids), ids.device) for table, ids in wanted]
    rows = wanted[0][0].source.rows([(table, unique) for table, unique, _, _ in found])
    return [
        (table._lend(unique, own.to(device)), places)
        for (table, unique, places, device), own in zip(found, rows, strict=True)
    ]


class EmbeddingBagCollection(nn.Module):
    """An EmbeddingBag per feature, whose rows come with one pull: as torchrec's of this name.

    tables: the table of each feature; several features may share one. forward() takes a KeyedJaggedTensor, or by
    feature int ids [B, N], or ids [N] with offsets [B]; it gives float32 [B, dim] by feature.
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable], mode: str = "sum") -> None:
        super().__init__()
        self.features, self.mode = dict(tables), _checked_mode(mode)
        self.tables = nn.ModuleList(dict.fromkeys(tables.values()))

    def forward(self, features: Any) -> dict[str, Tensor]:
        if hasattr(features, "to_dict"):
            jagged = features.to_dict()
            features = {name: (one.values(), one.offsets()[:-1]) for name, one in jagged.items()}
        given = {name: one if isinstance(one, tuple) else (one, None) for name, one in features.items()}
        missing = [name for name in self.features if name not in given]
        if missing:
            raise JobError(f"feature {missing[0]!r} is missing; the collection has {', '.join(self.features)}")
        found = look_up_all([(table, given[name][0]) for name, table in self.features.items()])
        return {
            name: _bags(places, rows, given[name][1], self.mode)
            for name, (rows, places) in zip(self.features, found, strict=True)
        }


def tables_of(model: nn.Module) -> dict[str, EmbeddingTable]:
    """The model's tables by name. Raises JobError for two tables of one name."""
    found: dict[str, EmbeddingTable] = {}
    for module in model.modules():
        if isinstance(module, EmbeddingTable) and found.setdefault(module.name, module) is not module:
            raise JobError(f"the model has two tables named {module.name!r}; share one EmbeddingTable, or rename one")
    return found
