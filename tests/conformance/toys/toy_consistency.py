"""A consistency from outside the package: every COUNT pushes, from any workers, make one update with their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency import CONSISTENCIES, Clock, Consistency, Gives
from shardline.consistency.base import OWN
from shardline.consistency.intake import ANSWERED, LEASED, BatchChoice, Intake
from shardline.consistency.numbered_pushes import NumberedPushes, Totals
from shardline.consistency.server import ServerHalf, Storage, Terms
from shardline.core.contributions import Partial, mean, merge, scaled
from shardline.core.image import WorkerSequence
from shardline.core.outcome import Outcome
from shardline.core.push_context import PushContext
from shardline.core.spec import TensorKind
from shardline.errors import JobError


@dataclass(frozen=True)
class Every(Consistency):
    """Every COUNT pushes make one update with their mean; workers don't wait for each other."""

    name: ClassVar[str] = "every"
    clock: ClassVar[Clock] = Clock.VERSION
    batches: ClassVar[BatchChoice] = LEASED
    intake: ClassVar[Intake] = ANSWERED
    gives: ClassVar[frozenset[Gives]] = OWN
    count: int = 2

    def __post_init__(self) -> None:
        if self.count < 1:
            raise JobError(f"consistency every: count is {self.count}; it must be at least 1")

    def held(self, nbytes: int, replicas: int) -> dict[str, int]:
        return {"sums": nbytes}

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        """See Consistency."""
        return EveryPushes(storage, terms, self.count)


class EveryPushes(NumberedPushes):
    """Adds pushes up, bucket by bucket, until there are enough."""

    def __init__(self, storage: Storage, terms: Terms, count: int) -> None:
        super().__init__(storage, terms)
        self._count = count
        self._open: dict[int, tuple[int, Partial]] = {}
        """(number of pushes added up, their sum) by bucket."""

    def take(self, totals: Totals, context: PushContext, *, outcome: Outcome, scale: float, record: int | None) -> None:
        """Add the push; apply the mean of the last COUNT."""
        for bucket, total in totals:
            gathered, kept = self._open.pop(bucket.number, (0, None))
            if kept is not None:
                self.storage.hold(-kept.held_bytes)
            # Memory lent for this push alone can't be kept.
            if bucket.spec.kind is TensorKind.BUFFER:
                # For buffers such as batch norm's statistics, the newest values count.
                total = owned(total) if kept is None or total.values is not None else kept
            else:
                total = owned(scaled(total, scale))
                total = total if kept is None else merge(kept, total, bucket.spec)
            if gathered + 1 == self._count:
                if bucket.spec.kind is not TensorKind.BUFFER:
                    total = mean(total, self._count)
                self.storage.apply_now(bucket, total, scale=1.0, context=context, record=record)
            else:
                self.storage.hold(total.held_bytes)
                self._open[bucket.number] = gathered + 1, total

    def settle(self) -> dict[str, WorkerSequence]:
        """Drops open sums, which is good enough for a toy: primary and standby then count from the same push."""
        for _, kept in self._open.values():
            self.storage.hold(-kept.held_bytes)
        self._open.clear()
        return super().settle()

    def restored(self, sequences: Mapping[str, WorkerSequence]) -> None:
        """See ServerHalf."""
        with self.storage.order:
            self.settle()
        super().restored(sequences)


def owned(total: Partial) -> Partial:
    """The same with its own memory, if it was borrowed."""
    if total.values is None or not total.borrowed:
        return total
    return Partial(total.values.clone(), total.present, bound=total.bound)


CONSISTENCIES.add(Every)
