"""The memory of a worker's tensors: its own here, shared with the servers in in_place.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardline.client.exchange.arrivals import Key


class ParameterMemory:
    """Decides which pulled buckets stay where a server published them: here none.

    Lanes call take(), stands() and loaded().
    """

    pending = False
    """Whether show() has anything to do."""

    @property
    def shared(self) -> Sequence[str]:
        """Names of the tensors that are currently in shared memory."""
        return ()

    def with_neighbours(self, keys: Iterable[Key]) -> Sequence[Key]:
        """These buckets and those without which show() can't show all of them."""
        return list(keys)

    def begin(self) -> None:
        """Note that a pull is about to begin."""

    def pulling(self) -> None:
        """Use the time in which nothing has arrived yet."""

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay in its memory; show() then makes the tensors show it."""
        return False

    def stands(self, key: Key, step: int) -> None:
        """Note that a bucket of `step` is unchanged."""

    def loaded(self, key: Key) -> None:
        """Note that a bucket is copied into the tensors."""

    def show(self) -> None:
        """Make the tensors show the buckets that have arrived. On the computing thread, between two uses of tensors."""

    def settle(self) -> None:
        """show() at the end of a pull: the tensors have their values of one step, wherever it came from."""

    def gradient(self, number: int) -> torch.Tensor | None:
        """Memory that the shard reads, in the shape of tensor `number` of the plan; None if there is currently none."""
        return None

    def release(self) -> None:
        """Leave every tensor's current value in private memory, where nothing changes it but a copying pull."""
