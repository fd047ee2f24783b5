"""What the chief and the parameter servers say about themselves: values to messages and back."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.core.status import (
    CheckpointStatus,
    ChiefStatus,
    EventStatus,
    HeldCut,
    PsStatus,
    ShardStatus,
    StandbyStatus,
    TaskStatus,
    Traffic,
)
from shardline.errors import ProtocolError
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2

PHASES: Mapping[str, chief_pb2.Phase.ValueType] = {
    "waiting": chief_pb2.PHASE_WAITING,
    "init": chief_pb2.PHASE_INIT,
    "running": chief_pb2.PHASE_RUNNING,
    "stopping": chief_pb2.PHASE_STOPPING,
    "ended": chief_pb2.PHASE_ENDED,
}
"""Phases of a job by name: tasks are missing; parameters are being set; training; ending; ended."""


def phase_from_proto(value: int) -> str:
    """Name of a phase; raises ProtocolError where this version doesn't know it."""
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
"""A standby as its primary sees it: there shall be none; it is not reached; it is being copied; it may take the
primary's place; it was whole and does not answer, so that the primary stands still."""


def standby_state(value: int) -> str:
    """Name of a standby's state; one that this version doesn't know is none that could be relied on."""
    return next((name for name, number in STANDBY_STATES.items() if number == value), "unprotected")


def traffic_from_proto(message: parameter_server_pb2.Traffic) -> Traffic:
    """Value of a message."""
    return Traffic(
        push_raw_bytes=message.push_raw_bytes,
        push_wire_bytes=message.push_wire_bytes,
        pull_raw_bytes=message.pull_raw_bytes,
        pull_wire_bytes=message.pull_wire_bytes,
    )


def traffic_to_proto(value: Traffic) -> parameter_server_pb2.Traffic:
    """Message of this value."""
    return parameter_server_pb2.Traffic(
        push_raw_bytes=value.push_raw_bytes,
        push_wire_bytes=value.push_wire_bytes,
        pull_raw_bytes=value.pull_raw_bytes,
        pull_wire_bytes=value.pull_wire_bytes,
    )


def held_cut_from_proto(message: parameter_server_pb2.HeldCut) -> HeldCut:
    """Value of a message."""
    return HeldCut(step=message.step, complete=message.complete, skipped=message.skipped)


def held_cut_to_proto(value: HeldCut) -> parameter_server_pb2.HeldCut:
    """Message of this value."""
    return parameter_server_pb2.HeldCut(step=value.step, complete=value.complete, skipped=value.skipped)


def standby_status_from_proto(message: parameter_server_pb2.StandbyStatus) -> StandbyStatus:
    """Value of a message."""
    return StandbyStatus(
        shard=message.shard,
        synced=message.synced,
        record=message.record,
        copy=message.copy,
        bytes=message.bytes,
        appointment=message.appointment,
    )


def standby_status_to_proto(value: StandbyStatus) -> parameter_server_pb2.StandbyStatus:
    """Message of this value."""
    return parameter_server_pb2.StandbyStatus(
        shard=value.shard,
        synced=value.synced,
        record=value.record,
        copy=value.copy,
        bytes=value.bytes,
        appointment=value.appointment,
    )


def shard_status_from_proto(message: parameter_server_pb2.ShardStatus) -> ShardStatus:
    """Value of a message."""
    return ShardStatus(
        shard=message.shard,
        step_min=message.step_min,
        step_max=message.step_max,
        version=message.version,
        initialized=message.initialized,
        cuts=tuple(held_cut_from_proto(cut) for cut in message.cuts),
        pushes=message.pushes,
        staleness_sum=message.staleness_sum,
        staleness_max=message.staleness_max,
        skipped_steps=message.skipped_steps,
        waiting_for=tuple(message.waiting_for),
        bytes=message.bytes,
        duplicate_mismatches=message.duplicate_mismatches,
        standby=standby_state(message.standby),
        standby_task=message.standby_task,
        standby_record=message.standby_record,
        standby_silent_s=message.standby_silent_s,
        standby_problem=message.standby_problem,
    )


def shard_status_to_proto(value: ShardStatus) -> parameter_server_pb2.ShardStatus:
    """Message of this value."""
    return parameter_server_pb2.ShardStatus(
        shard=value.shard,
        step_min=value.step_min,
        step_max=value.step_max,
        version=value.version,
        initialized=value.initialized,
        cuts=[held_cut_to_proto(cut) for cut in value.cuts],
        pushes=value.pushes,
        staleness_sum=value.staleness_sum,
        staleness_max=value.staleness_max,
        skipped_steps=value.skipped_steps,
        waiting_for=value.waiting_for,
        bytes=value.bytes,
        duplicate_mismatches=value.duplicate_mismatches,
        standby=STANDBY_STATES[value.standby],
        standby_task=value.standby_task,
        standby_record=value.standby_record,
        standby_silent_s=value.standby_silent_s,
        standby_problem=value.standby_problem,
    )


def ps_status_from_proto(message: parameter_server_pb2.PsStatusReply) -> PsStatus:
    """Value of a message."""
    return PsStatus(
        task=message.task,
        term=message.term.number,
        chief_uuid=message.term.chief_uuid,
        timeline=message.timeline,
        active=message.active,
        shards=tuple(shard_status_from_proto(shard) for shard in message.shards),
        traffic=traffic_from_proto(message.traffic),
        failure=message.failure,
        standbys=tuple(standby_status_from_proto(item) for item in message.standbys),
    )


def ps_status_to_proto(value: PsStatus) -> parameter_server_pb2.PsStatusReply:
    """Message of this value."""
    return parameter_server_pb2.PsStatusReply(
        task=value.task,
        term=parameter_server_pb2.Term(number=value.term, chief_uuid=value.chief_uuid),
        timeline=value.timeline,
        active=value.active,
        shards=[shard_status_to_proto(shard) for shard in value.shards],
        traffic=traffic_to_proto(value.traffic),
        failure=value.failure,
        standbys=[standby_status_to_proto(item) for item in value.standbys],
    )


def task_status_from_proto(message: chief_pb2.TaskStatus) -> TaskStatus:
    """Value of a message."""
    return TaskStatus(
        task=message.task,
        state=message.state,
        incarnation=message.incarnation,
        address=message.address,
        metrics_address=message.metrics_address,
        last_heard_s=message.last_heard_s,
        step=message.step,
        replicas=tuple(message.replicas),
        traffic=traffic_from_proto(message.traffic),
        push_bytes_per_s=message.push_bytes_per_s,
        pull_bytes_per_s=message.pull_bytes_per_s,
        shards=tuple(shard_status_from_proto(shard) for shard in message.shards),
        steps_per_s=message.steps_per_s,
        staleness=message.staleness,
        compute_s=message.compute_s,
        exchange_s=message.exchange_s,
    )


def task_status_to_proto(value: TaskStatus) -> chief_pb2.TaskStatus:
    """Message of this value."""
    return chief_pb2.TaskStatus(
        task=value.task,
        state=value.state,
        incarnation=value.incarnation,
        address=value.address,
        metrics_address=value.metrics_address,
        last_heard_s=value.last_heard_s,
        step=value.step,
        replicas=value.replicas,
        traffic=traffic_to_proto(value.traffic),
        push_bytes_per_s=value.push_bytes_per_s,
        pull_bytes_per_s=value.pull_bytes_per_s,
        shards=[shard_status_to_proto(shard) for shard in value.shards],
        steps_per_s=value.steps_per_s,
        staleness=value.staleness,
        compute_s=value.compute_s,
        exchange_s=value.exchange_s,
    )


def chief_status_from_proto(message: chief_pb2.ChiefStatusReply) -> ChiefStatus:
    """Value of a message; raises ProtocolError at a phase this version doesn't know."""
    return ChiefStatus(
        job=message.job,
        phase=phase_from_proto(message.phase),
        step=message.step,
        steps=message.steps,
        first_step=message.first_step,
        loss=message.loss,
        steps_per_s=message.steps_per_s,
        bytes_per_s=message.bytes_per_s,
        seconds=message.seconds,
        tasks=tuple(task_status_from_proto(task) for task in message.tasks),
        last_metrics=dict(message.last_metrics),
        checkpoint_step=message.checkpoint_step,
        checkpoint_path=message.checkpoint_path,
        events=tuple(message.events),
        exit_code=message.exit_code,
        reason=message.reason,
        out_dir=message.out_dir,
        consistency=message.consistency,
        time=message.time,
        missing=tuple(message.missing),
        said=tuple(EventStatus(time=e.time, level=e.level, sentence=e.sentence) for e in message.said),
        checkpoints=tuple(
            CheckpointStatus(step=c.step, path=c.path, bytes=c.bytes, age_s=c.age_s) for c in message.checkpoints
        ),
        last_metrics_step=message.last_metrics_step,
        best_step=message.best_step,
        best_metrics=dict(message.best_metrics),
        staleness=message.staleness,
        staleness_max=message.staleness_max,
        push_bytes_per_s=message.push_bytes_per_s,
        pull_bytes_per_s=message.pull_bytes_per_s,
        replicas=message.replicas,
        rule=message.rule,
        dead_s=message.dead_s,
        page=message.page,
        shard_bytes=tuple(message.shard_bytes),
        faults=tuple(message.faults),
    )


def chief_status_to_proto(value: ChiefStatus) -> chief_pb2.ChiefStatusReply:
    """Message of this value."""
    return chief_pb2.ChiefStatusReply(
        job=value.job,
        phase=PHASES[value.phase],
        step=value.step,
        steps=value.steps,
        first_step=value.first_step,
        loss=value.loss,
        steps_per_s=value.steps_per_s,
        bytes_per_s=value.bytes_per_s,
        seconds=value.seconds,
        tasks=[task_status_to_proto(task) for task in value.tasks],
        last_metrics=value.last_metrics,
        checkpoint_step=value.checkpoint_step,
        checkpoint_path=value.checkpoint_path,
        events=value.events,
        exit_code=value.exit_code,
        reason=value.reason,
        out_dir=value.out_dir,
        consistency=value.consistency,
        time=value.time,
        missing=value.missing,
        said=[chief_pb2.EventStatus(time=e.time, level=e.level, sentence=e.sentence) for e in value.said],
        checkpoints=[
            chief_pb2.CheckpointStatus(step=c.step, path=c.path, bytes=c.bytes, age_s=c.age_s)
            for c in value.checkpoints
        ],
        last_metrics_step=value.last_metrics_step,
        best_step=value.best_step,
        best_metrics=value.best_metrics,
        staleness=value.staleness,
        staleness_max=value.staleness_max,
        push_bytes_per_s=value.push_bytes_per_s,
        pull_bytes_per_s=value.pull_bytes_per_s,
        replicas=value.replicas,
        rule=value.rule,
        dead_s=value.dead_s,
        page=value.page,
        shard_bytes=value.shard_bytes,
        faults=value.faults,
    )
