"""Where a worker's tensors are: in its own memory, or in memory shared with the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardline.client.exchange.arrivals import Key


class Residence(Protocol):
    """Decides which pulled buckets stay where a server published them. Lanes call take() and loaded()."""

    @property
    def shared(self) -> Sequence[str]:
        """Names of the tensors that are currently in shared memory."""
        ...

    def pulling(self) -> None:
        """Note that a pull has begun: nothing computes with the tensors until settle()."""
        ...

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay in its memory."""
        ...

    def loaded(self, key: Key) -> None:
        """Note that a bucket was copied into private tensors."""
        ...

    def settle(self, step: int) -> None:
        """Point each tensor at its value; every bucket of this step has arrived."""
        ...

    def gradient(self, number: int) -> torch.Tensor | None:
        """Memory that the shard reads, in the shape of tensor `number` of the plan; None if there is currently none."""
        ...

    def release(self) -> None:
        """Move every tensor to private memory before the shared memory is freed."""
        ...


class Private:
    """All tensors are in the worker's own memory."""

    shared: Sequence[str] = ()

    def pulling(self) -> None:
        """See Residence."""

    def take(self, key: Key, memory: memoryview) -> bool:
        """See Residence."""
        return False

    def loaded(self, key: Key) -> None:
        """See Residence."""

    def settle(self, step: int) -> None:
        """See Residence."""

    def gradient(self, number: int) -> torch.Tensor | None:
        """See Residence."""
        return None

    def release(self) -> None:
        """See Residence."""


PRIVATE = Private()
