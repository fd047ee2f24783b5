"""Asynchronous mode: who trains on which batches. Pure.

Batches have global numbers [0, steps); what batch n holds is a function of the seed and n. They are handed out as
leases of a few batches. A lease is done when its pushes are acknowledged by every shard; the leases of a dead worker
are handed out again, so each batch is trained on at least once; those that may count twice are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardline.errors import CheckpointError

MAX_BATCHES = 16
"""Batches of one lease: few enough that a death repeats little, enough that leasing costs nothing."""
MOST_GIVEN = 256
"""Newest leases of a worker that are remembered once they are done: it reports their batches with its next beats."""


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
    """All batches of a job: not yet issued, issued, done."""

    def __init__(self, steps: int, *, done: Iterable[tuple[int, int]] = (), repeated: int = 0, number: int = 0) -> None:
        """done: ranges [first, end) finished before, from a checkpoint's cursor. number: of the last lease before."""
        self._steps = steps
        self._done = _merged(done)
        self._free = _gaps(self._done, steps)
        self._open: dict[int, Lease] = {}
        self._given: dict[int, deque[Lease]] = {}
        """By incarnation, its newest leases, open or done."""
        self._number = number
        self.repeated = repeated
        """Batches handed out again after a death or a stop; each may count twice in the parameters."""

    @property
    def steps(self) -> int:
        """Batches of the job."""
        return self._steps

    @property
    def done(self) -> int:
        """Batches whose lease is done."""
        return sum(end - first for first, end in self._done)

    @property
    def number(self) -> int:
        """Of the newest lease. A worker may still name an older one, so no number is used again."""
        return self._number

    @property
    def outstanding(self) -> int:
        """Leases handed out and not done."""
        return len(self._open)

    @property
    def all_done(self) -> bool:
        """Whether every batch is done."""
        return self.done >= self._steps

    def take(self, incarnation: int, *, workers: int) -> Lease | None:
        """The next lease, lowest batch first; None where all batches are issued.

        workers: living ones, so that the end of the job is spread over all of them.
        """
        if not self._free:
            return None
        left = sum(end - first for first, end in self._free)
        size = max(1, min(MAX_BATCHES, left // (4 * max(1, workers))))
        first, end = self._free[0]
        count = min(size, end - first)
        self._free[0:1] = [(first + count, end)] if first + count < end else []
        self._number += 1
        lease = Lease(number=self._number, first=first, count=count, incarnation=incarnation)
        self._hand_out(lease)
        return lease

    def _hand_out(self, lease: Lease) -> None:
        self._open[lease.number] = lease
        self._given.setdefault(lease.incarnation, deque(maxlen=MOST_GIVEN)).append(lease)

    @property
    def holders(self) -> set[int]:
        """Incarnations that hold a lease."""
        return {lease.incarnation for lease in self._open.values()}

    def has_given(self, incarnation: int) -> bool:
        """Whether this incarnation holds a lease, or held one."""
        return incarnation in self._given

    def has_given_batch(self, incarnation: int, batch: int) -> bool:
        """Whether one of this incarnation's newest leases, open or done, has this batch in it."""
        return any(lease.first <= batch < lease.end for lease in reversed(self._given.get(incarnation, ())))

    def held_by(self, incarnation: int) -> Lease | None:
        """What it holds already. A worker holds one lease at a time, so if it asks, the last answer was lost."""
        return next((lease for lease in self._open.values() if lease.incarnation == incarnation), None)

    def recall(self, lease: Lease) -> None:
        """A lease that was handed out before, by a chief whose journal is read."""
        self._number = max(self._number, lease.number)
        self._hand_out(lease)
        taken = [*self._done, *((held.first, held.end) for held in self._open.values())]
        self._free = _gaps(_merged(taken), self._steps)

    def finish(self, number: int, incarnation: int) -> bool:
        """Mark a lease done. False: it is not that incarnation's (it was handed to another, or done before)."""
        lease = self._open.get(number)
        if lease is None or lease.incarnation != incarnation:
            return False
        del self._open[number]
        self._done = _merged([*self._done, (lease.first, lease.end)])
        return True

    def fence(self, incarnation: int) -> Sequence[Lease]:
        """Take back what a fenced incarnation holds; returns those leases."""
        back = [lease for lease in self._open.values() if lease.incarnation == incarnation]
        self._given.pop(incarnation, None)
        for lease in back:
            del self._open[lease.number]
            self.repeated += lease.count
        self._free = _merged([*self._free, *((lease.first, lease.end) for lease in back)])
        return back

    def anew(self) -> Leases:
        """The same batches from the beginning: none of their updates is there any more."""
        again = self.done + sum(lease.count for lease in self._open.values())
        return self._followed_by(Leases(self._steps, repeated=self.repeated + again, number=self._number))

    def _followed_by(self, leases: Leases) -> Leases:
        """Those instead of these: who was given what stays known."""
        leases._given = self._given
        return leases

    def back_to(self, cursor: Mapping[str, Any]) -> Leases:
        """As a checkpoint has them, where every shard went back to it; the open ones are handed out again.

        Raises CheckpointError for a cursor that is none.
        """
        found = Leases.resumed(cursor, self._steps, number=self._number)
        found.repeated += sum(lease.count for lease in self._open.values())
        return self._followed_by(found)

    def cursor(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON: the done ranges. Taken BEFORE the shards copy themselves (PROTOCOL 1.7)."""
        return {
            "steps": self._steps,
            "done": [[first, end] for first, end in self._done],
            "repeated": self.repeated + sum(lease.count for lease in self._open.values()),
        }

    @classmethod
    def resumed(cls, cursor: Mapping[str, Any], steps: int, *, number: int = 0) -> Leases:
        """Leases of a job of `steps` batches that goes on after a checkpoint.

        Raises CheckpointError for a cursor that is none.
        """
        try:
            ranges = [(int(first), int(end)) for first, end in cursor.get("done", [])]
            repeated = int(cursor.get("repeated", 0))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's data cursor {dict(cursor)!r} is not one of batches") from error
        if any(not 0 <= first < end for first, end in ranges):
            raise CheckpointError(f"the checkpoint's data cursor has an impossible range of batches: {ranges}")
        done = [(first, min(end, steps)) for first, end in ranges if first < steps]
        return cls(steps, done=done, repeated=repeated, number=number)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, adjacent ones joined."""
    result: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return result


def _gaps(done: Sequence[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """What of [0, steps) is not in the sorted ranges."""
    result, at = [], 0
    for first, end in done:
        if first > at:
            result.append((at, first))
        at = max(at, end)
    if at < steps:
        result.append((at, steps))
    return result
