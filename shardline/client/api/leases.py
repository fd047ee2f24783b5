"""Ranges of batches that the chief of an asynchronous job leases to a worker."""

from __future__ import annotations

from shardline.core.orders import Phase
from shardline.errors import UnreachableError
from shardline.rpc.client import Lease
from shardline.rpc.link import ChiefLink


class WorkerLeases:
    """One worker's lease. `batch` is the number of the next batch to compute."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self.batch = 0

    @property
    def held(self) -> bool:
        """Whether a lease is held, finished or not."""
        return self._lease is not None

    @property
    def has_next(self) -> bool:
        return self._lease is not None and self.batch < self._lease.first + self._lease.count

    @property
    def end(self) -> int | None:
        """First batch after the lease; None without one."""
        return self._lease.first + self._lease.count if self._lease is not None else None

    def renew(self, link: ChiefLink) -> Lease:
        """Report the current lease as done and ask for the next, which may be empty. All its pushes are acknowledged.

        Waits while the chief is away. Raises the same errors as ChiefLink.ask.
        """
        done = [self._lease.number] if self._lease is not None else []
        try:
            lease = link.ask(lambda: link.client.lease(link.identity, done))
        except UnreachableError:
            if link.orders.phase is not Phase.ENDED:
                raise
            # The chief announced the end and exited.
            lease = Lease(number=0, first=0, count=0, ended=True)
        self.batch = lease.first
        self._lease = lease if lease.count else None
        return lease
