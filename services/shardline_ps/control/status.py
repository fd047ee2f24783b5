"""The status of a ps, as the message that every heartbeat carries."""

from __future__ import annotations

from shardline.rpc.messages.choices import choices_to_proto
from shardline.rpc.v1 import parameter_server_pb2
from shardline_ps.shard.shard import Shard
from shardline_ps.standby.sender import StandbySender, StandbyState
from shardline_ps.store import ParameterStore

STATES = {
    StandbyState.NONE: parameter_server_pb2.STANDBY_STATE_UNSPECIFIED,
    StandbyState.UNPROTECTED: parameter_server_pb2.STANDBY_STATE_UNPROTECTED,
    StandbyState.COPYING: parameter_server_pb2.STANDBY_STATE_COPYING,
    StandbyState.SYNCED: parameter_server_pb2.STANDBY_STATE_SYNCED,
    StandbyState.SILENT: parameter_server_pb2.STANDBY_STATE_SILENT,
}


def ps_status(task: str, store: ParameterStore, standbys: StandbySender) -> parameter_server_pb2.PsStatusReply:
    """Steps, versions, cuts, standbys, traffic."""
    authority = store.authority
    reply = parameter_server_pb2.PsStatusReply(
        task=task,
        term=parameter_server_pb2.Term(number=authority.term.number, chief_uuid=authority.term.chief_uuid),
        timeline=authority.timeline,
        active=authority.active,
        failure=store.failure,
        shards=[_shard(shard, standbys) for _, shard in sorted(store.shards.items())],
        standbys=[
            parameter_server_pb2.StandbyStatus(
                shard=number,
                synced=held.synced,
                record=held.record,
                copy=held.copy,
                bytes=held.nbytes,
                appointment=held.appointment,
            )
            for number, held in sorted(store.standbys.items())
        ],
    )
    pulls = store.configuration.coding.pull if store.configuration is not None else None
    with store.traffic_lock:
        reply.traffic.CopyFrom(
            parameter_server_pb2.Traffic(
                push_raw_bytes=store.traffic.push_raw,
                push_wire_bytes=store.traffic.push_wire,
                pull_raw_bytes=store.traffic.pull_raw,
                pull_wire_bytes=store.traffic.pull_wire,
                codec_error=(pulls.relative_error if pulls is not None else None) or 0.0,
            )
        )
    return reply


def _shard(shard: Shard, standbys: StandbySender) -> parameter_server_pb2.ShardStatus:
    standby = standbys.view(shard.number)
    step_min, choices = shard.step_min, shard.mode.choices
    made = choices.made() if choices is not None and choices.leads else None
    return parameter_server_pb2.ShardStatus(
        shard=shard.number,
        # A step is reported together with its choice, so that the chief never ends a run that lacks one.
        step_min=step_min if made is None else min(step_min, made.end),
        step_max=shard.step_max,
        version=shard.version,
        initialized=shard.initialized,
        cuts=[
            parameter_server_pb2.HeldCut(step=step, complete=complete, skipped=skipped)
            for step, complete, skipped in shard.cuts.status()
        ],
        pushes=shard.tally.pushes,
        staleness_sum=shard.tally.staleness_sum,
        staleness_max=shard.tally.staleness_max,
        skipped_steps=shard.tally.skipped_steps,
        waiting_for=shard.mode.waiting_for(),
        bytes=shard.held_bytes,
        duplicate_mismatches=shard.tally.duplicate_mismatches,
        standby=STATES[standby.state],
        standby_task=standby.task,
        standby_record=standby.record,
        standby_silent_s=standby.silent_s,
        standby_problem=standby.problem,
        choices=choices_to_proto(made) if made is not None else None,
    )
