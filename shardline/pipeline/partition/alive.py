"""Counts the memory of tensors while a layer computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what operations allocate for tensors, and what of it is freed. Views count nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: list[tuple[int, int]] = []
        """(number of a storage, bytes more), in order."""
        self._numbers: dict[int, int] = {}
        """By storage. A freed one's address may be another's soon."""
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._given: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What comes from elsewhere was there before.
        for storage in _storages((args, kwargs)):
            self._numbers.setdefault(storage._cdata, -1)
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            if storage._cdata not in self._numbers:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, number, size = storage._cdata, len(self._made), storage.nbytes()

        def gone(_: object) -> None:
            self._numbers.pop(key, None)
            self._changes.append((number, -size))

        self._numbers[key] = number
        self._made.append(weakref.ref(storage, gone))
        self._changes.append((number, size))

    def mark(self) -> int:
        return len(self._changes)

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are what a backward pass is given."""
        self._given.update(self._numbers[storage._cdata] for storage in _storages([*tensors]))

    def most_since(self, moment: int, without: Iterable[torch.Tensor], *, given: bool) -> int:
        """The most bytes that there have been from a moment on, more than then.

        without: what does not count. given: with what was given.
        """
        left_out = {self._numbers.get(storage._cdata) for storage in _storages([*without])}
        left_out.update(() if given else self._given)
        most = now = 0
        for number, change in self._changes[moment:]:
            if number not in left_out:
                now += change
                most = max(most, now)
        return most


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for one in pytree.tree_leaves(value):
        if isinstance(one, torch.Tensor):
            yield one.untyped_storage()
