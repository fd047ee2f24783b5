"""Status of the chief and the parameter servers: values to messages and back."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.core.choices import Choices
from shardline.core.status import ChiefStatus, PsStatus, ShardStatus
from shardline.errors import ProtocolError
from shardline.rpc.messages.fields import converts, from_message, to_message
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2


def choices_to_proto(choices: Choices) -> parameter_server_pb2.Choices | None:
    """The choices as a message; None if there are none."""
    if not choices.made:
        return None
    width = choices.width
    return parameter_server_pb2.Choices(first=choices.first, width=width, packed=choices.packed(width))


def choices_from_proto(message: parameter_server_pb2.Choices) -> Choices:
    """The choices of a message. Raises ProtocolError if they are malformed."""
    return Choices.unpacked(message.first, message.width, message.packed) if message.packed else Choices()


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


converts(Choices, choices_to_proto, choices_from_proto)
converts(
    ShardStatus,
    lambda value: to_message(parameter_server_pb2.ShardStatus, value, standby=STANDBY_STATES[value.standby]),
    lambda message: from_message(ShardStatus, message, standby=standby_state(message.standby)),
)


def ps_status_from_proto(message: parameter_server_pb2.PsStatusReply) -> PsStatus:
    return from_message(PsStatus, message, term=message.term.number, chief_uuid=message.term.chief_uuid)


def chief_status_from_proto(message: chief_pb2.ChiefStatusReply) -> ChiefStatus:
    """The message as a value. Raises ProtocolError if this version doesn't know the phase."""
    return from_message(ChiefStatus, message, phase=phase_from_proto(message.phase))


def chief_status_to_proto(value: ChiefStatus) -> chief_pb2.ChiefStatusReply:
    return to_message(chief_pb2.ChiefStatusReply, value, phase=PHASES[value.phase])
