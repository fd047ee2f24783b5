"""Barriers of a script: values to messages and back."""

from __future__ import annotations

from shardline.core.orders import BarrierPlace, BarrierState
from shardline.rpc.v1 import chief_pb2


def barrier_place_from_proto(message: chief_pb2.BarrierPlace) -> BarrierPlace:
    return BarrierPlace(message.step, message.begun, message.number, message.value)


def barrier_place_to_proto(value: BarrierPlace) -> chief_pb2.BarrierPlace:
    return chief_pb2.BarrierPlace(step=value.step, begun=value.begun, number=value.number, value=value.value)


def barrier_state_from_proto(message: chief_pb2.BarrierState) -> BarrierState:
    return BarrierState(
        place=barrier_place_from_proto(message.place),
        passed=message.passed,
        hopeless=message.hopeless,
        waits_for=tuple(message.waits_for),
    )


def barrier_state_to_proto(value: BarrierState) -> chief_pb2.BarrierState:
    return chief_pb2.BarrierState(
        place=barrier_place_to_proto(value.place),
        passed=value.passed,
        hopeless=value.hopeless,
        waits_for=value.waits_for,
    )
