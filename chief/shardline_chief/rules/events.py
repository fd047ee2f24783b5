"""What can happen to a job, as values. The tables in machine.py say what follows from each, by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.codecs.auto import CodecSpeed
from shardline.core.status import ShardStatus
from shardline.errors import ShardlineError
from shardline_chief.rules.actions import CommandResult, Found, Order, Saved
from shardline_chief.rules.messages import JoinAnswer
from shardline_chief.rules.state.membership import Member


class Event:
    """Base class of all events."""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed; sent about ten times a second."""


@dataclass(frozen=True)
class Progressed(Event):
    """Something happened that may let the job end, or its ending proceed. Follows every outside event."""


@dataclass(frozen=True)
class Arrived(Event):
    """A task was admitted."""


@dataclass(frozen=True)
class TrainerLost(Event):
    """A task that trains is dead or leaving, and the servers know of it."""

    member: Member
    sentence: str
    level: str = "warning"


@dataclass(frozen=True)
class Fenced(Event):
    """Every server has fenced a lost task that trains."""

    lost: TrainerLost


@dataclass(frozen=True)
class Known(Event):
    """Every server knows a life that waits to be admitted."""

    ticket: Any
    answer: JoinAnswer
    replaced: int | None = None
    """The life before it, which all have fenced."""


@dataclass(frozen=True)
class StrangerLost(Event):
    """A task is dead that no server knows in this timeline."""

    member: Member
    sentence: str


@dataclass(frozen=True)
class ServerLost(Event):
    """A parameter server is dead, does not answer, is unreachable for the tasks that train, or lacks its shards."""

    task: str
    why: str
    back: bool = False
    """Its process is there, but empty: a new one that asks for its place, or one that says so."""


@dataclass(frozen=True)
class OrderAnswered(Event):
    """Every server has answered an order, if only with an error."""

    number: int
    order: Order
    result: CommandResult
    current: bool
    """The timeline is still the one in which it was given."""

    @property
    def done(self) -> bool:
        """Whether every server has done it, and it still counts."""
        return self.current and not self.result.errors


@dataclass(frozen=True)
class OrderRefused(Event):
    """Servers answered an order with an error."""

    order: Order
    errors: Mapping[str, ShardlineError]


@dataclass(frozen=True)
class ShardsTold(Event):
    """A server reported the state of its shards, in this timeline."""

    task: str
    shards: tuple[ShardStatus, ...]


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, or could not be written."""

    saved: Saved


@dataclass(frozen=True)
class CheckpointFound(Event):
    """The checkpoint to roll back to, or why there is none."""

    found: Found


@dataclass(frozen=True)
class CodecsMeasured(Event):
    """The speeds of codecs, by name; empty if they could not be measured."""

    speeds: Mapping[str, CodecSpeed]


@dataclass(frozen=True)
class ServersReady(Event):
    """Every server has its values and accepts pushes."""


@dataclass(frozen=True)
class TrainingBegins(Event):
    """Workers are ordered to train. again: they have trained before in this run."""

    again: bool


@dataclass(frozen=True)
class EndAsked(Event):
    """The job is to end. done: all steps are done. exit_code: nonzero for a failure; no step is closed after one."""

    reason: str
    exit_code: int = 0
    done: bool = False
