"""Barriers of a script, as workers and chief speak of them."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.rpc.v1 import chief_pb2


@dataclass(frozen=True, order=True)
class BarrierPlace:
    """One barrier. Places are ordered: who is at a later one has been at all before it."""

    step: int
    """Step that the worker is in; 0 in asynchronous mode."""
    begun: bool
    """It has begun a step since its process was started."""
    number: int
    """How many it has met before in this step; in asynchronous mode since its process was started."""

    @classmethod
    def from_proto(cls, message: chief_pb2.BarrierPlace) -> BarrierPlace:
        """Value of a message."""
        return cls(message.step, message.begun, message.number)

    def to_proto(self) -> chief_pb2.BarrierPlace:
        """Message of this value."""
        return chief_pb2.BarrierPlace(step=self.step, begun=self.begun, number=self.number)


@dataclass(frozen=True, kw_only=True)
class BarrierState:
    """How it stands with the barrier that a worker told last."""

    place: BarrierPlace
    passed: bool
    """All workers have been there: it may go on."""
    hopeless: bool = False
    """Somebody it waits for has ended and will never come."""
    waits_for: tuple[str, ...] = ()
    """Workers that have not been there; of a hopeless one those that have ended."""

    @classmethod
    def from_proto(cls, message: chief_pb2.BarrierState) -> BarrierState:
        """Value of a message."""
        return cls(
            place=BarrierPlace.from_proto(message.place),
            passed=message.passed,
            hopeless=message.hopeless,
            waits_for=tuple(message.waits_for),
        )

    def to_proto(self) -> chief_pb2.BarrierState:
        """Message of this value."""
        return chief_pb2.BarrierState(
            place=self.place.to_proto(), passed=self.passed, hopeless=self.hopeless, waits_for=self.waits_for
        )
