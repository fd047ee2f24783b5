"""What can happen to a job, and its stages, each with the phase that tasks see: machine.py says what follows."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardline.codecs.auto import CodecSpeed
from shardline.core.orders import Phase
from shardline.core.status import ShardStatus
from shardline.errors import ShardlineError
from shardline_chief.rules.actions import CommandResult, Found, Order, Saved
from shardline_chief.rules.messages import JoinAnswer
from shardline_chief.rules.state.membership import Member


class Stage(enum.Enum):
    """What the chief is doing with the job now."""

    HEARING = enum.auto()
    """Takeover: waiting until each known server has been heard or is known to be gone."""
    ASKING = enum.auto()
    """Takeover: asking the reachable servers what they hold, since standbys may have to be promoted."""
    ADOPTING = enum.auto()
    """Takeover: taking command and comparing what the servers hold with the journal."""

    GATHERING = enum.auto()
    """Start: tasks are missing, or the job is not known yet."""
    NOTHING_LEFT = enum.auto()
    """Start: the checkpoint to resume from has all steps; waiting for the remaining tasks, to tell them so."""

    PREPARING = enum.auto()
    """Preparation: the servers lack some of what the layout wants; reconcile.py says what is next."""
    INITIALIZING = enum.auto()
    """Preparation: a worker sets the first values."""
    FIRST_CUT = enum.auto()
    """Preparation: the checkpoint of step 0 is taken."""
    READY = enum.auto()
    """Preparation: all is ready; waiting for enough tasks that train."""

    TRAINING = enum.auto()

    FINDING = enum.auto()
    """Recovery: waiting for the checkpoint to roll back to, which may still be being written."""
    PLACING = enum.auto()
    """Recovery: waiting for servers that can hold the shards."""

    CHOOSING = enum.auto()
    """Ending: asking for the shards' progress, to choose the stop step."""
    REACHING = enum.auto()
    """Ending: waiting until every shard is at the stop step, or every lease is done."""
    CUTTING = enum.auto()
    """Ending: taking the last checkpoint."""
    SCORING = enum.auto()
    """Ending: waiting for the evaluator."""
    COUNTING = enum.auto()
    """Ending: asking for the last figures."""

    ENDED = enum.auto()
    """Nothing more is decided."""


TAKEOVER = frozenset({Stage.HEARING, Stage.ASKING, Stage.ADOPTING})
"""A restarted chief has not taken command yet: tasks keep their last orders."""
UNHEARD = frozenset({Stage.HEARING, Stage.ASKING})
"""Nothing can be decided yet: it is not known which servers are there, or what they hold."""
START = frozenset({Stage.GATHERING, Stage.NOTHING_LEFT})
PREPARATION = frozenset({Stage.PREPARING, Stage.INITIALIZING, Stage.FIRST_CUT, Stage.READY})
TRAINING = frozenset({Stage.TRAINING})
RECOVERY = frozenset({Stage.FINDING, Stage.PLACING})
ENDING = frozenset({Stage.CHOOSING, Stage.REACHING, Stage.CUTTING, Stage.SCORING, Stage.COUNTING})
ENDED = frozenset({Stage.ENDED})
ANY = frozenset(Stage)
RECONCILED = frozenset({Stage.ASKING, Stage.ADOPTING}) | PREPARATION | TRAINING | ENDING
"""Stages in which servers are given what they lack."""

PHASES: dict[Stage, Phase] = {
    **dict.fromkeys(START, Phase.WAITING),
    **dict.fromkeys(PREPARATION | RECOVERY, Phase.INIT),
    Stage.TRAINING: Phase.RUNNING,
    **dict.fromkeys(ENDING, Phase.STOPPING),
    Stage.ENDED: Phase.ENDED,
}
"""Phase that tasks see in each stage; during a takeover they keep the last chief's."""


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
