"""Where a worker's tensors are: in its own memory, or in memory shared with the servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from shardline.client.exchange.arrivals import Key


class Residence(Protocol):
    """Decides which pulled buckets stay where a server published them. Lanes call take(), stands() and loaded()."""

    pending: bool
    """Whether show() has anything to do."""

    @property
    def shared(self) -> Sequence[str]:
        """Names of the tensors that are currently in shared memory."""
        ...

    def with_neighbours(self, keys: Iterable[Key]) -> Sequence[Key]:
        """These buckets and those without which show() can't show all of them."""
        ...

    def begin(self) -> None:
        """Note that a pull is about to begin."""
        ...

    def pulling(self) -> None:
        """Use the time in which nothing has arrived yet."""
        ...

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay in its memory; show() then makes the tensors show it."""
        ...

    def stands(self, key: Key, step: int) -> None:
        """Note that a bucket of `step` is unchanged."""
        ...

    def loaded(self, key: Key) -> None:
        """Note that a bucket is copied into the tensors."""
        ...

    def show(self) -> None:
        """Make the tensors show the buckets that have arrived. On the computing thread, between two uses of tensors."""
        ...

    def settle(self) -> None:
        """The same at the end of a pull: the tensors have their values of one step, wherever it came from."""
        ...

    def gradient(self, number: int) -> torch.Tensor | None:
        """Memory that the shard reads, in the shape of tensor `number` of the plan; None if there is currently none."""
        ...

    def release(self) -> None:
        """Leave every tensor's current value in private memory, where nothing changes it but a copying pull."""
        ...


class Private:
    """All tensors are in the worker's own memory."""

    shared: Sequence[str] = ()
    pending = False

    def with_neighbours(self, keys: Iterable[Key]) -> Sequence[Key]:
        return list(keys)

    def begin(self) -> None: ...

    def pulling(self) -> None: ...

    def take(self, key: Key, memory: memoryview) -> bool:
        return False

    def stands(self, key: Key, step: int) -> None: ...

    def loaded(self, key: Key) -> None: ...

    def show(self) -> None: ...

    def settle(self) -> None: ...

    def gradient(self, number: int) -> torch.Tensor | None:
        return None

    def release(self) -> None: ...


PRIVATE = Private()
