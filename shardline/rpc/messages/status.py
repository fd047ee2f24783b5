"""Status of the chief and the parameter servers: values to messages and back."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.core.status import (
    Awaited,
    CheckpointStatus,
    ChiefStatus,
    Counting,
    EventStatus,
    HeldCut,
    PsStatus,
    ShardStatus,
    StageStatus,
    StandbyStatus,
    Standstill,
    TaskStatus,
    Traffic,
)
from shardline.errors import ProtocolError
from shardline.rpc.messages.choices import choices_from_proto, choices_to_proto
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2

PHASES: Mapping[str, chief_pb2.Phase.ValueType] = {
    "waiting": chief_pb2.PHASE_WAITING,
    "init": chief_pb2.PHASE_INIT,
    "running": chief_pb2.PHASE_RUNNING,
    "stopping": chief_pb2.PHASE_STOPPING,
    "ended": chief_pb2.PHASE_ENDED,
}
"""Phases of a job, by name: tasks are missing; parameters are being set; training; ending; ended."""


def phase_from_proto(value: int) -> str:
    """Name of a phase. Raises ProtocolError if this version doesn't know it."""
    for name, number in PHASES.items():
        if number == value:
            return name
    raise ProtocolError(f"the chief is in phase {value}, which this version doesn't know; is it a newer Shardline?")


STANDBY_STATES: Mapping[str, parameter_server_pb2.StandbyState.ValueType] = {
    "": parameter_server_pb2.STANDBY_STATE_UNSPECIFIED,
    "unprotected": parameter_server_pb2.STANDBY_STATE_UNPROTECTED,
    "copying": parameter_server_pb2.STANDBY_STATE_COPYING,
    "synced": parameter_server_pb2.STANDBY_STATE_SYNCED,
    "silent": parameter_server_pb2.STANDBY_STATE_SILENT,
}
"""A standby as its primary sees it: none wanted; unreachable; being copied; complete, so it may be promoted; was
complete and does not answer, which blocks the primary."""


def standby_state(value: int) -> str:
    """Name of a standby's state; an unknown one counts as unprotected."""
    return next((name for name, number in STANDBY_STATES.items() if number == value), "unprotected")


def traffic_from_proto(message: parameter_server_pb2.Traffic) -> Traffic:
    return from_message(Traffic, message)


def traffic_to_proto(value: Traffic) -> parameter_server_pb2.Traffic:
    return to_message(parameter_server_pb2.Traffic, value)


def shard_status_from_proto(message: parameter_server_pb2.ShardStatus) -> ShardStatus:
    return from_message(
        ShardStatus,
        message,
        cuts=tuple(from_message(HeldCut, cut) for cut in message.cuts),
        standby=standby_state(message.standby),
        choices=choices_from_proto(message.choices),
    )


def shard_status_to_proto(value: ShardStatus) -> parameter_server_pb2.ShardStatus:
    return to_message(
        parameter_server_pb2.ShardStatus,
        value,
        cuts=[to_message(parameter_server_pb2.HeldCut, cut) for cut in value.cuts],
        standby=STANDBY_STATES[value.standby],
        choices=choices_to_proto(value.choices),
    )


def ps_status_from_proto(message: parameter_server_pb2.PsStatusReply) -> PsStatus:
    return from_message(
        PsStatus,
        message,
        term=message.term.number,
        chief_uuid=message.term.chief_uuid,
        shards=tuple(shard_status_from_proto(shard) for shard in message.shards),
        traffic=traffic_from_proto(message.traffic),
        standbys=tuple(from_message(StandbyStatus, item) for item in message.standbys),
    )


def task_status_from_proto(message: chief_pb2.TaskStatus) -> TaskStatus:
    return from_message(
        TaskStatus,
        message,
        traffic=traffic_from_proto(message.traffic),
        shards=tuple(shard_status_from_proto(shard) for shard in message.shards),
    )


def task_status_to_proto(value: TaskStatus) -> chief_pb2.TaskStatus:
    return to_message(
        chief_pb2.TaskStatus,
        value,
        traffic=traffic_to_proto(value.traffic),
        shards=[shard_status_to_proto(shard) for shard in value.shards],
    )


def _standstill_from_proto(message: chief_pb2.Standstill) -> Standstill:
    return from_message(Standstill, message, awaited=tuple(from_message(Awaited, one) for one in message.awaited))


def _standstill_to_proto(value: Standstill) -> chief_pb2.Standstill:
    awaited = [to_message(chief_pb2.Awaited, one) for one in value.awaited]
    return to_message(chief_pb2.Standstill, value, awaited=awaited)


def chief_status_from_proto(message: chief_pb2.ChiefStatusReply) -> ChiefStatus:
    """The message as a value. Raises ProtocolError if this version doesn't know the phase."""
    return from_message(
        ChiefStatus,
        message,
        phase=phase_from_proto(message.phase),
        tasks=tuple(task_status_from_proto(task) for task in message.tasks),
        said=tuple(from_message(EventStatus, event) for event in message.said),
        checkpoints=tuple(from_message(CheckpointStatus, checkpoint) for checkpoint in message.checkpoints),
        stages=tuple(from_message(StageStatus, stage) for stage in message.stages),
        standstill=_standstill_from_proto(message.standstill) if message.HasField("standstill") else None,
        counting=from_message(Counting, message.counting) if message.HasField("counting") else Counting(),
    )


def chief_status_to_proto(value: ChiefStatus) -> chief_pb2.ChiefStatusReply:
    return to_message(
        chief_pb2.ChiefStatusReply,
        value,
        phase=PHASES[value.phase],
        tasks=[task_status_to_proto(task) for task in value.tasks],
        said=[to_message(chief_pb2.EventStatus, event) for event in value.said],
        checkpoints=[to_message(chief_pb2.CheckpointStatus, checkpoint) for checkpoint in value.checkpoints],
        stages=[to_message(chief_pb2.StageStatus, stage) for stage in value.stages],
        standstill=_standstill_to_proto(value.standstill) if value.standstill is not None else None,
        counting=to_message(chief_pb2.Counting, value.counting),
    )
