"""Asynchronous mode: who trains on which batches. Pure.

Batches have global numbers [0, steps); the content of batch n is a function of the seed and n. They are handed out as
leases of a few batches. A lease is done once every shard has acknowledged its pushes. The leases of a dead worker are
handed out again, so each batch is trained on at least once; batches that may count twice are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.errors import CheckpointError

MAX_BATCHES = 16
"""Most batches per lease: few enough that a death repeats little, enough that leasing costs nothing."""
MOST_GIVEN = 256
"""Leases remembered per worker after they are done: it reports their batches with its next heartbeats."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Batches [first, first + count) for one incarnation of a worker."""

    number: int
    first: int
    count: int
    incarnation: int

    @property
    def end(self) -> int:
        """First batch after the lease."""
        return self.first + self.count


class Leases:
    """All batches of a job: free, leased or done."""

    def __init__(self, steps: int, *, done: Iterable[tuple[int, int]] = (), repeated: int = 0, number: int = 0) -> None:
        """done: ranges [first, end) finished before, from a checkpoint's cursor. number: of the last lease so far."""
        self.steps = steps
        self._done = _merged(done)
        self._free = _gaps(self._done, steps)
        self._open: dict[int, Lease] = {}
        self._given: dict[int, deque[Lease]] = {}
        """Newest leases of each incarnation, open or done."""
        self.number = number
        """Number of the newest lease. A worker may still name an older one, so numbers are never reused."""
        self.repeated = repeated
        """Batches handed out again after a death or a stop; each may count twice in the parameters."""

    @property
    def done(self) -> int:
        return sum(end - first for first, end in self._done)

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def all_done(self) -> bool:
        return self.done >= self.steps

    def take(self, incarnation: int, *, workers: int) -> Lease | None:
        """The next lease, lowest batch first; None if no batch is free.

        workers: number of living workers; leases shrink near the end of the job, so that all of them share it.
        """
        if not self._free:
            return None
        left = sum(end - first for first, end in self._free)
        size = max(1, min(MAX_BATCHES, left // (4 * max(1, workers))))
        first, end = self._free[0]
        count = min(size, end - first)
        self._free[0:1] = [(first + count, end)] if first + count < end else []
        self.number += 1
        lease = Lease(number=self.number, first=first, count=count, incarnation=incarnation)
        self._hand_out(lease)
        return lease

    def _hand_out(self, lease: Lease) -> None:
        self._open[lease.number] = lease
        self._given.setdefault(lease.incarnation, deque(maxlen=MOST_GIVEN)).append(lease)

    @property
    def holders(self) -> set[int]:
        return {lease.incarnation for lease in self._open.values()}

    def has_given(self, incarnation: int) -> bool:
        return incarnation in self._given

    def has_given_batch(self, incarnation: int, batch: int) -> bool:
        """Whether one of this incarnation's newest leases, open or done, contains this batch."""
        return any(lease.first <= batch < lease.end for lease in reversed(self._given.get(incarnation, ())))

    def held_by(self, incarnation: int) -> Lease | None:
        """Its open lease, or None. A worker has one at a time, so if it asks again, the last answer was lost."""
        return next((lease for lease in self._open.values() if lease.incarnation == incarnation), None)

    def recall(self, lease: Lease) -> None:
        """Restore a lease that an earlier chief handed out, from its journal."""
        self.number = max(self.number, lease.number)
        self._hand_out(lease)
        taken = [*self._done, *((held.first, held.end) for held in self._open.values())]
        self._free = _gaps(_merged(taken), self.steps)

    def finish(self, number: int, incarnation: int) -> bool:
        """Mark a lease done. False: it is not open for that incarnation (handed to another worker, or done before)."""
        lease = self._open.get(number)
        if lease is None or lease.incarnation != incarnation:
            return False
        del self._open[number]
        self._done = _merged([*self._done, (lease.first, lease.end)])
        return True

    def fence(self, incarnation: int) -> Sequence[Lease]:
        """Take back the open leases of a fenced incarnation, and return them."""
        back = [lease for lease in self._open.values() if lease.incarnation == incarnation]
        self._given.pop(incarnation, None)
        for lease in back:
            del self._open[lease.number]
            self.repeated += lease.count
        self._free = _merged([*self._free, *((lease.first, lease.end) for lease in back)])
        return back

    def anew(self) -> Leases:
        """The same batches from the beginning: none of their updates exist any more."""
        again = self.done + sum(lease.count for lease in self._open.values())
        return self._followed_by(Leases(self.steps, repeated=self.repeated + again, number=self.number))

    def _followed_by(self, leases: Leases) -> Leases:
        """Replace these leases by others that still know who was given what."""
        leases._given = self._given
        return leases

    def back_to(self, cursor: Mapping[str, Any]) -> Leases:
        """The leases of a checkpoint that every shard was rolled back to; open ones are handed out again.

        Raises CheckpointError if the cursor is invalid.
        """
        found = Leases.resumed(cursor, self.steps, number=self.number)
        found.repeated += sum(lease.count for lease in self._open.values())
        return self._followed_by(found)

    def cursor(self) -> dict[str, Any]:
        """The checkpoint's data cursor, as JSON. Take it BEFORE the shards copy themselves (PROTOCOL 1.7)."""
        return {
            "steps": self.steps,
            "done": [[first, end] for first, end in self._done],
            "repeated": self.repeated + sum(lease.count for lease in self._open.values()),
        }

    @classmethod
    def resumed(cls, cursor: Mapping[str, Any], steps: int, *, number: int = 0) -> Leases:
        """Leases of a job of `steps` batches that resumes from a checkpoint.

        Raises CheckpointError if the cursor is invalid.
        """
        try:
            ranges = [(int(first), int(end)) for first, end in cursor.get("done", [])]
            repeated = int(cursor.get("repeated", 0))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's data cursor {dict(cursor)!r} does not count batches") from error
        if any(not 0 <= first < end for first, end in ranges):
            raise CheckpointError(f"the checkpoint's data cursor has an impossible range of batches: {ranges}")
        done = [(first, min(end, steps)) for first, end in ranges if first < steps]
        return cls(steps, done=done, repeated=repeated, number=number)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in ascending order, overlapping and adjacent ones merged."""
    result: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result


def _gaps(done: Sequence[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """The parts of [0, steps) that are not in the sorted ranges."""
    result, at = [], 0
    for first, end in done:
        if first > at:
            result.append((at, first))
        at = max(at, end)
    if at < steps:
        result.append((at, steps))
    return result
