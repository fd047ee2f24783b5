"""The first checks of every data message: its sender, timeline and lane."""

from __future__ import annotations

import contextlib

from shardline.core.identity import Identity
from shardline.core.outcome import FEATURES, Decision, Outcome
from shardline.core.reduce import Block
from shardline.errors import UnreachableError
from shardline.lanes.attachments import Attachment, Attachments, Holder
from shardline.rpc.limits import MAX_FIGURES, MAX_NAME, at_most, short
from shardline.rpc.messages.data import ON_STREAM, lane_name
from shardline.rpc.v1 import common_pb2, data_pb2
from shardline.server.backend import Backend

_TO_PROTO = {outcome: common_pb2.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome}


def outcome_to_proto(outcome: Outcome) -> common_pb2.Outcome.ValueType:
    return _TO_PROTO[outcome]


def outcome_name(outcome: int) -> str:
    """Lower-case name, such as "counted" for OUTCOME_COUNTED."""
    return common_pb2.Outcome.Name(common_pb2.Outcome.ValueType(outcome)).removeprefix("OUTCOME_").lower()


def attachment_of(attachments: Attachments, data: common_pb2.DataHeader) -> Attachment | None:
    """The attachment for a message's bytes; None = its own stream. Raises UnreachableError if it is not open."""
    lane = lane_name(data.lane)
    if lane is None or lane == ON_STREAM.lane:
        return None
    found = attachments.find(data.attachment)
    if found is not None and found.lane == lane:
        holder = found.holder
        if holder.task == data.task and holder.incarnation == data.incarnation and holder.shard == data.shard:
            return found
    raise UnreachableError(
        f"attachment {data.attachment:#x} ({lane}) of {data.task} to shard {data.shard} is not open; open it again"
    )


def drop_named(attachments: Attachments, data: common_pb2.DataHeader, reason: str) -> None:
    """End the attachment that a message names, if it belongs to the sender: only its opener knows the number."""
    with contextlib.suppress(UnreachableError):
        named = attachment_of(attachments, data)
        if named is not None:
            attachments.drop(named, reason)


def holder_of(data: common_pb2.DataHeader, *, beside: bool = False) -> Holder:
    return Holder(task=data.task, incarnation=data.incarnation, shard=data.shard, beside=beside)


def admit_data(backend: Backend, data: common_pb2.DataHeader, *, init: bool) -> Decision:
    """Whether a data message may be processed. Raises ProtocolError for malformed names."""
    job, plan_id, task = data.job, data.plan_id, data.task
    if len(job) > MAX_NAME or len(plan_id) > MAX_NAME or len(task) > MAX_NAME:
        for name in (job, plan_id, task):
            short(name, "a name in the head of a message")
    if data.required_features:
        at_most(len(data.required_features), MAX_FIGURES, "features that a message requires")
        for name in data.required_features:
            short(name, "a name in the head of a message")
        unknown = ", ".join(sorted(set(data.required_features) - set(FEATURES)))
        if unknown:
            return Decision(Outcome.REFUSED, f"this ps does not support what the message requires: {unknown}")
    if lane_name(data.lane) is None:
        return Decision(Outcome.REFUSED, f"lane number {data.lane} is unknown to this ps")
    if data.stage:
        return Decision(Outcome.REFUSED, f"the message is for pipeline stage {data.stage}; this job has no stages")
    decision = backend.admit(
        job=job,
        timeline=data.timeline,
        plan_id=plan_id,
        who=Identity(task, data.incarnation, data.secret),
        init=init,
    )
    if decision.outcome is Outcome.SERVED and data.shard not in backend.shards:
        return Decision(Outcome.REFUSED, f"shard {data.shard} is not on this ps; it has {sorted(backend.shards)}")
    return decision


def admit_push(backend: Backend, header: data_pb2.PushHeader, *, init: bool) -> Decision:
    """Whether a push may be processed: as admit_data, and its block must be within the job's replicas."""
    decision = admit_data(backend, header.data, init=init)
    if init or decision.outcome is not Outcome.SERVED:
        return decision
    shard, block = backend.shard(header.data.shard), Block(header.block.first, header.block.count)
    if block.end <= shard.replicas or shard.consistency.intake.number(header.seq) is not None:
        return decision
    return Decision(Outcome.REFUSED, f"block {block} is outside the job's {shard.replicas} replicas")
