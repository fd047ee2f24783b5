"""Configure: the chief's value, the ps's value, and the message between them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardline.codecs import coding_of
from shardline.codecs.coding import JobCoding
from shardline.core.choices import Choices
from shardline.core.placement import Placement
from shardline.core.plan import Plan
from shardline.core.settings import Settings, known
from shardline.core.spec import ConsistencySpec, RuleSpec, ScheduleSpec
from shardline.rpc.limits import MAX_TENSORS, at_most, short
from shardline.rpc.messages.convert import (
    consistency_from_proto,
    rule_from_proto,
    settings_from_proto,
    settings_to_proto,
)
from shardline.rpc.messages.fields import from_message, to_message
from shardline.rpc.messages.status import choices_from_proto, choices_to_proto
from shardline.rpc.v1 import parameter_server_pb2
from shardline.update import completed


@dataclass(frozen=True, kw_only=True)
class PsConfiguration(Settings):
    """All that a ps needs to host its shards, including the job's settings; an equal one changes nothing."""

    job: str
    timeline: int
    plan: Plan
    shards: tuple[int, ...]
    rule: RuleSpec
    schedule: ScheduleSpec
    consistency: ConsistencySpec
    cut_every: int
    standbys: tuple[int, ...] = ()
    """Shards whose standby is on this ps."""
    replayed: Choices = field(default_factory=Choices)
    """Choices of another run, which the lead repeats."""

    @functools.cached_property
    def coding(self) -> JobCoding:
        """The codecs for the plan. Raises JobError for one that doesn't exist."""
        return coding_of(self, self.plan)


@dataclass(frozen=True, kw_only=True)
class Configuration(PsConfiguration):
    """The same, with what may change while the shards stay."""

    placement: tuple[Placement, ...] = ()
    activate: bool = False
    keep: tuple[int, ...] = ()
    """Shards that keep their values."""
    keep_standbys: tuple[int, ...] = ()
    """Standbys that are kept."""


def placement_to_proto(placement: Iterable[Placement]) -> list[parameter_server_pb2.Placement]:
    return [to_message(parameter_server_pb2.Placement, item) for item in placement]


def placement_from_proto(messages: Sequence[parameter_server_pb2.Placement]) -> tuple[Placement, ...]:
    """The placement. Raises ProtocolError if there are too many items, or their names are too long."""
    # Every shard has at least one slice of a tensor.
    at_most(len(messages), MAX_TENSORS, "placements")
    for item in messages:
        for text in (item.task, item.address, item.standby_task, item.standby_address):
            short(text, f"placement of shard {item.shard}: a task or address")
    return tuple(from_message(Placement, item) for item in messages)


def configuration_to_proto(
    configuration: Configuration, term: parameter_server_pb2.Term
) -> parameter_server_pb2.ConfigureRequest:
    return to_message(
        parameter_server_pb2.ConfigureRequest,
        configuration,
        without={*known(), "keep"},
        term=term,
        settings=settings_to_proto(configuration),
        keep_shards=configuration.keep,
        replayed=choices_to_proto(configuration.replayed),
    )


def configuration_from_proto(message: parameter_server_pb2.ConfigureRequest) -> PsConfiguration:
    """The configuration. Raises ProtocolError, UsageError or JobError if it is invalid."""
    settings = settings_from_proto(message.settings, "Configure")
    for named, what in (
        (message.shards, "shards"),
        (message.standbys, "standbys"),
        (message.keep_shards, "shards to keep"),
        (message.keep_standbys, "standbys to keep"),
    ):
        # A slight excess gets its own error message, which names the shards.
        at_most(len(named), max(64, len(message.plan.shards)), f"Configure: {what}")
    return from_message(
        PsConfiguration,
        message,
        without=known(),
        **settings,
        job=short(message.job, "name of the job"),
        rule=completed(rule_from_proto(message.rule)),
        consistency=consistency_from_proto(message.consistency),
        replayed=choices_from_proto(message.replayed),
    )
