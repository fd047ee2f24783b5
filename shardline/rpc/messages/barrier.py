"""Barriers of a script: values to messages and back."""

from __future__ import annotations

from shardline.core.orders import BarrierPlace, BarrierState
from shardline.rpc.v1 import chief_pb2


def barrier_place_from_proto(message: chief_pb2.BarrierPlace) -> BarrierPlace:
    """The message as a value."""
    return BarrierPlace(message.step, message.begun, message.number)


def barrier_place_to_proto(value: BarrierPlace) -> chief_pb2.BarrierPlace:
    """The value as a message."""
    return chief_pb2.BarrierPlace(step=value.step, begun=value.begun, number=value.number)


def barrier_state_from_proto(message: chief_pb2.BarrierState) -> BarrierState:
    """The message as a value."""
    return BarrierState(
        place=barrier_place_from_proto(message.place),
        passed=message.passed,
        hopeless=message.hopeless,
        waits_for=tuple(message.waits_for),
    )


def barrier_state_to_proto(value: BarrierState) -> chief_pb2.BarrierState:
    """The value as a message."""
    return chief_pb2.BarrierState(
        place=barrier_place_to_proto(value.place),
        passed=value.passed,
        hopeless=value.hopeless,
        waits_for=value.waits_for,
    )
