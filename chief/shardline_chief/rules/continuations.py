"""What follows once every server has answered an order, as values.

An `After` says "once the table is known, admit this task"; machine.py has the rule of each. Where `needs_all` is set it
follows only where every server did what it was told, in the timeline in which it was asked; else it follows with
whatever was answered, and the rule looks at the errors itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardline_chief.rules.actions import Configure, Promotion
from shardline_chief.rules.messages import JoinAnswer
from shardline_chief.rules.state.membership import Member


class After:
    """Base of all of them."""

    needs_all: ClassVar[bool] = True


# Preparation


@dataclass(frozen=True)
class LeadThenConfigure(After):
    """The servers obey this chief: begin a timeline."""


@dataclass(frozen=True)
class LeadThenPromote(After):
    """The servers obey this chief: let standbys become primaries."""

    promoted: Mapping[int, Promotion]


@dataclass(frozen=True)
class PromoteThenConfigure(After):
    """Standbys are primaries: begin a timeline."""


@dataclass(frozen=True)
class ConfigureThenTable(After):
    """The servers have their shards: tell them who trains."""


@dataclass(frozen=True)
class TableThenFill(After):
    """The servers know who trains: fill the shards."""


@dataclass(frozen=True)
class RestoreThenActivate(After):
    """The shards are filled from the checkpoint."""


@dataclass(frozen=True)
class ActivateThenBound(After):
    """The servers admit pushes: tell them where to stop."""


@dataclass(frozen=True)
class BoundThenTrain(After):
    """The servers know where to stop."""


# Standbys, while training goes on


@dataclass(frozen=True)
class LeadThenPlaceStandbys(After):
    """The servers obey this chief: tell them who holds whose standby."""

    configure: Configure


@dataclass(frozen=True)
class PlaceStandbysThenTable(After):
    """The servers know it: tell those that were not there before who trains."""


@dataclass(frozen=True)
class TableThenActivateStandbys(After):
    """The servers know who trains: have those that were not there before admit pushes."""


@dataclass(frozen=True)
class StandbysPlaced(After):
    """All of it is done."""


# Members


@dataclass(frozen=True)
class FenceThenMove(After):
    """No server takes anything from a lost life any more: its work goes to the living."""

    needs_all: ClassVar[bool] = False
    member: Member
    sentence: str
    level: str


@dataclass(frozen=True)
class TableThenAdmit(After):
    """Every server knows the new life: it may begin. replaced: incarnation that it takes the place of."""

    needs_all: ClassVar[bool] = False
    ticket: Any
    answer: JoinAnswer
    replaced: int | None


# Checkpoints


@dataclass(frozen=True)
class CutThenSave(After):
    """Every shard has copied itself: fetch the copies."""

    step: int
    cursor: dict[str, Any] = field(default_factory=dict)


# Ending


@dataclass(frozen=True)
class StatusThenChoose(After):
    """It is known how far the shards are: choose the step to stop at."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class StopThenReach(After):
    """The servers were told to stop at a step that lies ahead."""

    step: int


@dataclass(frozen=True)
class StandThenCut(After):
    """The servers were told to stop where they stand."""

    step: int


@dataclass(frozen=True)
class StatusThenFinalCut(After):
    """It is known how far the shards are: the last copy can be numbered."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class StatusThenEnd(After):
    """The last figures are there."""

    needs_all: ClassVar[bool] = False


# Takeover


@dataclass(frozen=True)
class LeadThenAsk(After):
    """Servers that live obey this chief, whoever is missing: ask what they hold."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class StatusThenResume(After):
    """It is known what they hold: go on as it is, with standbys, or from a checkpoint."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class LeadThenCompare(After):
    """All servers obey this chief: ask what they hold."""


@dataclass(frozen=True)
class StatusThenAdopt(After):
    """It is known what they hold: compare it with the journal."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class AdoptThenActivate(After):
    """The servers know who trains."""


@dataclass(frozen=True)
class AdoptThenBound(After):
    """The servers admit pushes."""


@dataclass(frozen=True)
class AdoptThenTrain(After):
    """The servers were told where to stop."""
