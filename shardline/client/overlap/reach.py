"""Which tensors of a model can be read only through the tables of its modules."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from sys import getrefcount
from typing import Any

import torch
from torch import nn

from shardline.core.tensor_bytes import memory_uses

TABLES = ("_parameters", "_buffers")
"""Where an nn.Module keeps its own tensors, by attribute name."""


class Reach:
    """Counts who refers to a model's tensors besides its modules.

    To read a tensor, code needs a reference to it, or to another tensor over the same memory. Python counts references
    to the object, torch those from C++ and those to the memory. A tensor is *firm* if the only one besides our own is
    an entry of a module's table: then every reader has to ask that table. A list of parameters, a closure, a view, a
    scripted module or a living autograd graph makes a tensor *loose*.

    tensors: the model's own, from a container that holds each once. known: further containers that hold some of them,
    such as an optimizer's groups.
    """

    def __init__(
        self, model: nn.Module, tensors: Collection[torch.Tensor], known: Iterable[Collection[torch.Tensor]] = ()
    ) -> None:
        self._tensors = list(tensors)
        self.tables = list(tables_of(model))
        """Of all modules that the model has at first, with the names of their attributes."""
        self.loose: set[int] = set()
        """id() of each tensor that something else refers to, at the last look."""
        listed = Counter(id(item) for items in (tensors, *known) for item in items)
        if self._loose_at_first(listed):
            # What only garbage refers to is firm.
            gc.collect()
            self.loose = self._loose_at_first(listed)
        self.rebase()

    def _loose_at_first(self, listed: Mapping[int, int]) -> set[int]:
        counts, references = firm_counts()
        found = {
            id(item)
            for item, (python, *others) in zip(self._tensors, self._counts(), strict=True)
            if -1 in counts or (python - listed[id(item)], *others) != counts
        }
        return found | self._inside(number for number, held in enumerate(self._held()) if held != references)

    def rebase(self) -> None:
        """Count all present references as our own. Tensors that are loose now are so for good."""
        self._always = frozenset(self.loose)
        self._base = self._counts(), self._held()

    def look(self) -> None:
        """Find the tensors that are loose."""
        found = self._changed() | self._always
        if found - self.loose:
            # Young garbage only: it may come in each step, and going through all objects takes a tenth of a second.
            gc.collect(1)
            found = self._changed() | self._always
        self.loose = found

    def _changed(self) -> set[int]:
        counts, held = self._counts(), self._held()
        if (counts, held) == self._base:
            return set()
        found = {id(item) for item, now, then in zip(self._tensors, counts, self._base[0], strict=True) if now != then}
        found |= self._inside(n for n, (now, then) in enumerate(zip(held, self._base[1], strict=True)) if now != then)
        return found

    def _inside(self, tables: Iterable[int]) -> set[int]:
        return {id(value) for number in tables for value in self.tables[number][2].values()}

    def _counts(self) -> list[tuple[int, int, int, int]]:
        """References to each tensor: from Python besides tables (weak ones too), from C++, to its memory, to
        Python's object of its memory.
        """
        placed = Counter(id(value) for _, _, table in self.tables for value in table.values())
        return [
            (
                getrefcount(item) + weakref.getweakrefcount(item) - placed[id(item)],
                _count_native(item),
                memory_uses(item),
                getrefcount(item.untyped_storage()),
            )
            for item in self._tensors
        ]

    def _held(self) -> list[tuple[int, bool]]:
        """References to each table; whether its module still keeps its tensors there."""
        return [(getrefcount(table), module.__dict__.get(name) is table) for module, name, table in self.tables]


def tables_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, dict[str, Any]]]:
    """Every module's tables that are ordinary dicts, with the names of their attributes."""
    for module in model.modules():
        for name in TABLES:
            table = module.__dict__.get(name)
            if type(table) is dict and table:
                yield module, name, table


# Not part of torch's interface: without it no tensor is firm.
_count_native: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _tensor: -1)


@functools.cache
def firm_counts() -> tuple[tuple[int, int, int, int], tuple[int, bool]]:
    """Counts of a tensor that only a module's table refers to, and of that table."""
    module = nn.Linear(1, 1, bias=False)
    probe = Reach.__new__(Reach)
    probe._tensors = list(module.parameters())
    probe.tables = list(tables_of(module))
    (counts,), (references,) = probe._counts(), probe._held()
    return counts, references
