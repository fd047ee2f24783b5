"""Batches of an asynchronous job that the chief leases to a worker, a run of them at a time."""

from __future__ import annotations

from shardline.core.orders import Phase
from shardline.errors import UnreachableError
from shardline.rpc.client import Lease
from shardline.rpc.link import ChiefLink


class WorkerLeases:
    """One worker's leases. `batch` is the number of the next batch to compute."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self.batch = 0

    @property
    def held(self) -> bool:
        """Whether a lease is held, finished or not."""
        return self._lease is not None

    @property
    def has_next(self) -> bool:
        """Whether `batch` is within the lease."""
        return self._lease is not None and self.batch < self._lease.first + self._lease.count

    def renew(self, link: ChiefLink) -> Lease:
        """Report the lease as done, all of whose pushes are acknowledged, and ask for another; it may be empty.

        Waits for a chief that is away. Raises like ChiefLink.ask.
        """
        done = [self._lease.number] if self._lease is not None else []
        try:
            lease = link.ask(lambda: link.client.lease(link.identity, done))
        except UnreachableError:
            if link.orders.phase is not Phase.ENDED:
                raise
            # It has told the end and gone.
            lease = Lease(number=0, first=0, count=0, ended=True)
        self.batch = lease.first
        self._lease = lease if lease.count else None
        return lease
