"""Where a worker's tensors lie: in memory of their own, or in memory that is shared with the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardline.client.exchange.arrivals import Key


class Residence(Protocol):
    """Decides which pulled buckets stay where a server published them. take() and loaded() are called by lanes."""

    @property
    def shared(self) -> Sequence[str]:
        """Names of the tensors that lie in shared memory now."""
        ...

    def take(self, key: Key, memory: memoryview) -> bool:
        """Whether a bucket that the shard refers to may stay where it lies."""
        ...

    def loaded(self, key: Key) -> None:
        """A bucket was copied into private tensors."""
        ...

    def settle(self, step: int) -> None:
        """Every bucket of this step has come: point each tensor at its value."""
        ...

    def gradient(self, number: int) -> torch.Tensor | None:
        """Memory that the shard reads, in the shape of tensor `number` of the plan; None if there is none now."""
        ...

    def release(self) -> None:
        """Give every tensor memory of its own, before what is shared goes."""
        ...


class Private:
    """Every tensor lies in the worker's own memory."""

    shared: Sequence[str] = ()

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
