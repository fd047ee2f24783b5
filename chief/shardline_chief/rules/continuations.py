"""Follow-ups to an order that every server has answered, as values.

Each `After` is named for the order and what follows it; machine.py maps each to its rule. If `needs_all` is set, the
rule runs only if every server succeeded and the timeline is still the one in which the order was given. Otherwise it
runs whatever was answered, and looks at the errors itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardline_chief.rules.actions import Configure, Promotion
from shardline_chief.rules.messages import JoinAnswer
from shardline_chief.rules.state.membership import Member


class After:
    needs_all: ClassVar[bool] = True


# Preparation


@dataclass(frozen=True)
class LeadThenConfigure(After):
    """The servers obey this chief: begin a timeline."""


@dataclass(frozen=True)
class LeadThenPromote(After):
    """The servers obey this chief: promote standbys."""

    promoted: Mapping[int, Promotion]


@dataclass(frozen=True)
class PromoteThenConfigure(After):
    """The standbys have been promoted: begin a timeline."""


@dataclass(frozen=True)
class ConfigureThenTable(After):
    """The servers have their shards: send the table of members."""


@dataclass(frozen=True)
class TableThenFill(After):
    """The servers have the table of members: fill the shards."""


@dataclass(frozen=True)
class RestoreThenActivate(After):
    """The shards have been filled from the checkpoint: activate them."""


@dataclass(frozen=True)
class ActivateThenBound(After):
    """The servers accept pushes: send the stop step."""


@dataclass(frozen=True)
class BoundThenTrain(After):
    """The servers have the stop step: train."""


# Standbys, while training continues


@dataclass(frozen=True)
class LeadThenPlaceStandbys(After):
    """The servers obey this chief: send the new placement of the standbys."""

    configure: Configure


@dataclass(frozen=True)
class PlaceStandbysThenTable(After):
    """The servers have the placement: send the table of members to those that just joined."""


@dataclass(frozen=True)
class TableThenActivateStandbys(After):
    """The servers have the table of members: have those that just joined accept pushes."""


@dataclass(frozen=True)
class StandbysPlaced(After):
    """The new standbys are in place."""


# Members


@dataclass(frozen=True)
class FenceThenMove(After):
    """Every server has fenced a lost life: give its work to living tasks."""

    needs_all: ClassVar[bool] = False
    member: Member
    sentence: str
    level: str


@dataclass(frozen=True)
class TableThenAdmit(After):
    """Every server knows the new life: admit it. replaced: incarnation that it replaces, or None."""

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
    """The shards' progress is known: choose the stop step."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class StopThenReach(After):
    """The servers have a stop step that is still ahead of them."""

    step: int


@dataclass(frozen=True)
class StandThenCut(After):
    """The servers were ordered to stop where they are."""

    step: int


@dataclass(frozen=True)
class StatusThenFinalCut(After):
    """The shards' progress is known: the last cut can be numbered."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class StatusThenEnd(After):
    """The last figures have arrived."""

    needs_all: ClassVar[bool] = False


# Takeover


@dataclass(frozen=True)
class LeadThenAsk(After):
    """All reachable servers obey this chief: ask what they hold."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class StatusThenResume(After):
    """The servers have reported what they hold: resume as it is, with standbys, or from a checkpoint."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class LeadThenCompare(After):
    """All servers obey this chief: ask what they hold."""


@dataclass(frozen=True)
class StatusThenAdopt(After):
    """The servers have reported what they hold: compare it with the journal."""

    needs_all: ClassVar[bool] = False


@dataclass(frozen=True)
class AdoptThenActivate(After):
    """The servers have the table of members: activate them."""


@dataclass(frozen=True)
class AdoptThenBound(After):
    """The servers accept pushes: send the stop step again."""


@dataclass(frozen=True)
class AdoptThenTrain(After):
    """The servers have the stop step: train."""
