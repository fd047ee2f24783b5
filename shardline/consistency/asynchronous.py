"""Asynchronous rules (PROTOCOL 1.5): each push of a worker to a shard is applied once, in its order. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.consistency.base import Clock, Consistency
from shardline.core.outcome import Decision, Outcome


@dataclass(frozen=True)
class Asynchronous(Consistency):
    """Every worker's gradient is an update of its own."""

    name: ClassVar[str] = "async"
    clock: ClassVar[Clock] = Clock.VERSION
    whole_pushes: ClassVar[bool] = True
    replies_with_push: ClassVar[bool] = True
    leases_batches: ClassVar[bool] = True
    clips_at_worker: ClassVar[bool] = True
    counts_staleness: ClassVar[bool] = True

    def contributors(self, replicas: int) -> int:
        """One: a batch is one replica's."""
        return 1


def admit_push(seq: int, *, last_seq: int, skip: bool = False) -> Decision:
    """Whether push number `seq` of an incarnation counts at a shard that has applied up to last_seq.

    Exactly last_seq + 1 is accepted: remembering only the highest number would lose the retry of a lower one.
    """
    if seq < 1:
        return Decision(Outcome.REFUSED, f"sequence number {seq}; numbers start at 1")
    if seq <= last_seq:
        return Decision(Outcome.DUPLICATE, f"push {seq} was applied before, the shard is at {last_seq}")
    if seq > last_seq + 1:
        return Decision(Outcome.OUT_OF_SEQUENCE, f"push {seq} came where {last_seq + 1} was expected")
    return Decision(Outcome.SKIPPED if skip else Outcome.APPLIED)


def renumber(seq: int, *, last_seq: int) -> int:
    """Number under which a push that isn't acknowledged yet goes on after its shard went back to a cut.

    seq: its number before; last_seq: what Progress says after the restore. Where the cut holds the push it keeps its
    number, is answered DUPLICATE and so not applied twice; else it takes the next one.
    """
    return min(seq, last_seq + 1)


def staleness(version: int, base_version: int) -> int:
    """Updates applied by others between the pull and this push's apply."""
    return max(0, version - base_version)
