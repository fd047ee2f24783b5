"""What can happen to a job, as values. machine.py has the table of what follows from each, by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardline.core.status import ShardStatus
from shardline.errors import ShardlineError
from shardline_chief.rules.actions import Found, Order, Saved
from shardline_chief.rules.state.membership import Member


class Event:
    """Base of all events."""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed; comes about ten times a second."""


@dataclass(frozen=True)
class Progressed(Event):
    """Something has happened that may let the job end, or its end go on. Follows every event from outside."""


@dataclass(frozen=True)
class Arrived(Event):
    """A task was admitted."""


@dataclass(frozen=True)
class TrainerLost(Event):
    """A task that trains is dead or leaves, and servers know of it."""

    member: Member
    sentence: str
    level: str = "warning"


@dataclass(frozen=True)
class StrangerLost(Event):
    """A task is dead of which no server knows in this timeline."""

    member: Member
    sentence: str


@dataclass(frozen=True)
class ServerLost(Event):
    """A parameter server is dead, does not answer, or can't be reached by those that train."""

    task: str
    why: str


@dataclass(frozen=True)
class ServerRestarted(Event):
    """A new process asks for the place of a silent server: what that one held is gone."""

    task: str
    why: str


@dataclass(frozen=True)
class OrderRefused(Event):
    """Servers answered that they did not do what they were told."""

    order: Order
    errors: Mapping[str, ShardlineError]


@dataclass(frozen=True)
class ShardsTold(Event):
    """A server of this timeline described its shards."""

    task: str
    shards: tuple[ShardStatus, ...]


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was committed, or could not be."""

    saved: Saved


@dataclass(frozen=True)
class CheckpointFound(Event):
    """The checkpoint to go back to, or why there is none."""

    found: Found


@dataclass(frozen=True)
class ServersReady(Event):
    """Every server has its values and admits pushes."""


@dataclass(frozen=True)
class TrainingBegins(Event):
    """Workers are told to train. again: they have trained before in this run."""

    again: bool


@dataclass(frozen=True)
class EndAsked(Event):
    """The job is to end. done: every step is made; exit_code != 0: a failure, so no further step can be made."""

    reason: str
    exit_code: int = 0
    done: bool = False
