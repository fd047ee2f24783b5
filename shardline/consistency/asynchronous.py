"""Asynchronous pushes: each is applied as it arrives and answered with the values after it. PROTOCOL 1.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import OWN, Clock, Consistency, Gives, in_stages
from shardline.consistency.intake import ANSWERED, LEASED, BatchChoice, Intake
from shardline.consistency.numbered_pushes import NumberedPushes, Totals
from shardline.consistency.server import ServerHalf, Terms
from shardline.core.outcome import Outcome
from shardline.core.push_context import PushContext
from shardline.core.spec import ConsistencySpec
from shardline.storage.shard import Storage
from shardline.update.base import Need


@dataclass(frozen=True)
class Asynchronous(Consistency):
    """Asynchronous: each gradient is applied as a separate update when it arrives.

    in_stages: each stage of a pipeline by itself. A job with a pipeline sets it.
    """

    name: ClassVar[str] = "async"
    clock: ClassVar[Clock] = Clock.VERSION
    batches: ClassVar[BatchChoice] = LEASED
    intake: ClassVar[Intake] = ANSWERED
    gives: ClassVar[frozenset[Gives]] = OWN | {Gives.EQUAL_MOVES}
    tells: ClassVar[frozenset[Need]] = frozenset(Need)
    in_stages: bool = False

    def staged(self) -> Consistency:
        return Asynchronous(in_stages=True)

    def plain(self) -> Consistency:
        return Asynchronous()

    def under(self, spec: ConsistencySpec) -> Consistency:
        """In a pipeline no worker has a whole push."""
        return in_stages("async") if self.in_stages else self

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return AsynchronousPushes(storage, terms)


class AsynchronousPushes(NumberedPushes):
    """Every push that counts is an update."""

    def take(self, totals: Totals, context: PushContext, *, outcome: Outcome, scale: float, record: int | None) -> None:
        for bucket, total in totals:
            self.storage.apply_now(bucket, total, scale=scale, context=context, record=record)
