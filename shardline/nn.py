"""Layers over embedding tables whose rows are on the parameter servers.

    users = shardline.EmbeddingTable("users", dim=64, rule="rowwise-adagrad:lr=0.05")
    layer = shardline.nn.EmbeddingBag(users, mode="mean")      # as torch.nn.EmbeddingBag, for ids of any int64 value

A table is no parameter of the model: it has no fixed number of rows, and a pass pulls those that its ids name and pushes
their gradients. Several layers may share a table.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardline.core.rows import PARTS, pack, summed
from shardline.errors import JobError
from shardline.update.rows import ROW_INITS, ROW_RULES, RowInit, RowRule


class RowSource(Protocol):
    """Whoever has the rows of tables: the servers, a checkpoint, this process."""

    def rows(self, table: EmbeddingTable, ids: Tensor) -> Tensor:
        """Rows (float32 [U, dim], on the CPU) of unique ids (int64 [U], on the CPU), which belong to the caller."""


class InitialRows:
    """Rows of tables that nobody has trained."""

    def rows(self, table: EmbeddingTable, ids: Tensor) -> Tensor:
        return ROW_INITS.parse(table.init).rows(table.name, ids, table.dim)


class EmbeddingTable(nn.Module):
    """A table of embeddings by id: any int64, with no limit to their number.

    name: unique in the model; checkpoints keep the rows under it. rule: updates the rows that had a gradient, and no
    others; see docs/tables.md. init: the values of a row before its first gradient, a function of its id alone.
    num_ids: ids are below it and not negative, which is checked; None = any.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        rule: str | RowRule = "rowwise-adagrad",
        init: str | RowInit = "uniform",
        num_ids: int | None = None,
    ) -> None:
        """Raises JobError for an unknown rule or init, or a dim below 1."""
        super().__init__()
        if not name or dim < 1:
            raise JobError(f"table {name!r} has dim {dim}; a table has a name, and a dim of at least 1")
        self.name, self.dim, self.num_ids = name, dim, num_ids
        self.rule, self.init = str(ROW_RULES.parse(rule, "rule")), str(ROW_INITS.parse(init, "init"))
        self.source: RowSource = InitialRows()
        self.placeholder = torch.empty(PARTS, dim, device="meta")
        """Stands for the rows among the model's tensors."""
        self._used: list[tuple[Tensor, Tensor]] = []
        """Ids and rows of the passes since the last take()."""

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}, rule={self.rule!r}, init={self.init!r}"

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (float32 [U, dim]) of the unique ids of an int tensor of any shape, and the place of each id among them.

        Both are on the ids' device. The rows take a gradient, where gradients are enabled. Raises JobError naming an id
        that is none.
        """
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise JobError(f"table {self.name!r}: ids are {ids.dtype}; they must be integers, such as ids.long()")
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        unique, places = torch.unique(flat, return_inverse=True)
        if self.num_ids is not None and len(unique) and not 0 <= unique[0] <= unique[-1] < self.num_ids:
            wrong = unique[0] if unique[0] < 0 else unique[-1]
            raise JobError(f"table {self.name!r}: id {int(wrong)} is not within 0 to {self.num_ids - 1} (num_ids)")
        rows = self.source.rows(self, unique).to(ids.device)
        if torch.is_grad_enabled():
            self._used.append((unique, rows.requires_grad_()))
        return rows, places.view(ids.shape).to(ids.device)

    def take(self) -> Tensor | None:
        """The gradients of all rows that passes have used since the last call, packed (core.rows); None without any.

        A row that several passes, or layers, have used gets the sum, in their order.
        """
        used, self._used = self._used, []
        parts = [(ids, rows.grad.detach().cpu()) for ids, rows in used if rows.grad is not None and len(ids)]
        if not parts:
            return None
        ids, gradients = torch.cat([ids for ids, _ in parts]), torch.cat([gradient for _, gradient in parts])
        return pack(*(summed(ids, gradients) if len(parts) > 1 else (ids, gradients)))

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
        return functional.embedding(places, rows)


class EmbeddingBag(nn.Module):
    """torch.nn.EmbeddingBag over a table: the sum, mean or max of the rows of each bag of ids.

    ids: int [B, N], or [N] with the bags' first places in `offsets`, as in torch. Gives float32 [B, dim].
    per_sample_weights: of the ids' shape, for mode "sum".
    """

    def __init__(self, table: EmbeddingTable, mode: str = "mean", *, include_last_offset: bool = False) -> None:
        super().__init__()
        self.table, self.mode, self.include_last_offset = table, mode, include_last_offset

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        rows, places = self.table.look_up(ids)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )


def tables_of(model: nn.Module) -> dict[str, EmbeddingTable]:
    """The model's tables by name. Raises JobError for two tables of one name."""
    found: dict[str, EmbeddingTable] = {}
    for module in model.modules():
        if isinstance(module, EmbeddingTable) and found.setdefault(module.name, module) is not module:
            raise JobError(f"the model has two tables named {module.name!r}; share one EmbeddingTable, or rename one")
    return found
