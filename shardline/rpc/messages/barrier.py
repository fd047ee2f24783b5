"""Barriers of a script: values to messages and back."""

from __future__ import annotations

from shardline.core.orders import BarrierPlace, BarrierState
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.v1 import chief_pb2


def barrier_place_from_proto(message: chief_pb2.BarrierPlace) -> BarrierPlace:
    return from_message(BarrierPlace, message)


def barrier_place_to_proto(value: BarrierPlace) -> chief_pb2.BarrierPlace:
    return to_message(chief_pb2.BarrierPlace, value)


def barrier_state_to_proto(value: BarrierState) -> chief_pb2.BarrierState:
    return to_message(chief_pb2.BarrierState, value)
