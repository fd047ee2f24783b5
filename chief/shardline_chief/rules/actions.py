"""What the chief's rules decide to do, as plain values that tests can read; control.py carries them out in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.core.choices import Choices
from shardline.core.placement import Placement
from shardline.core.plan import Plan
from shardline.core.spec import JobSpec
from shardline.errors import ShardlineError
from shardline_chief.rules.state.checkpoints import Resume


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Reply to a waiting call. `ticket` is the caller's own object, passed back unchanged."""

    ticket: Any
    value: Any


@dataclass(frozen=True, kw_only=True)
class Tell:
    """A line for the chief's own log only, such as the repeated notes on how long a wait has left."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Say:
    """A line for the event log. level: "info", "warning" or "error"."""

    kind: str
    sentence: str
    level: str = "info"
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JournalLine:
    """A journal entry; it is on disk before the actions that follow."""

    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Take command of every ps that will hold shards; later commands go to these servers."""

    addresses: Mapping[str, str]
    """Address of each server, by task."""


@dataclass(frozen=True, kw_only=True)
class Configure:
    """Give every ps its shards."""

    job: JobSpec
    plan: Plan
    timeline: int
    placement: tuple[Placement, ...]
    keep: frozenset[int] = frozenset()
    """Shards that keep their values; the others are created again."""
    keep_standbys: frozenset[int] = frozenset()
    """Shards whose standbys stay where they are and keep following; the others are copied again."""
    replayed: Choices = field(default_factory=Choices)
    """The choices of the run that this one repeats."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Send the living incarnations, by task, to every ps."""

    timeline: int
    members: Mapping[str, int]
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """Digest of each life's secret, by task."""


@dataclass(frozen=True)
class Promotion:
    """A standby to be promoted: the server that holds it, and the appointment it was copied for."""

    task: str
    appointment: int = 0


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Make standbys the primaries of their shards, in a timeline of their own."""

    timeline: int
    shards: Mapping[int, Promotion]


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Fill every shard, except those in `keep`, from the checkpoint that the run resumes from."""

    timeline: int
    plan: Plan
    placement: tuple[Placement, ...]
    keep: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Activate:
    """Have every ps accept pushes and pulls."""

    timeline: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Make a cut at a step. Result per ps: (whether it is already past the step, highest step of its buckets)."""

    timeline: int
    step: int
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Release:
    """Drop a cut."""

    timeline: int
    step: int
    noted: int = 0
    """With spares: the journal has the choices of all steps before this one."""


@dataclass(frozen=True, kw_only=True)
class AskStatus:
    """Ask every ps for its status."""


Order = Lead | Configure | Members | Promote | Restore | Activate | Cut | Release | AskStatus


@dataclass(frozen=True, kw_only=True)
class Command:
    """An order to every ps. Commands run one after another, each on all servers in parallel."""

    number: int
    order: Order


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Answer of each ps, by task; each task is in exactly one of the two mappings."""

    values: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, ShardlineError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Save:
    """Fetch a cut that all shards hold, and commit it as a checkpoint."""

    step: int
    timeline: int
    plan: Plan
    job: JobSpec
    placement: tuple[Placement, ...]
    cursor: Mapping[str, Any]
    urgent: bool = False
    """Nothing is training meanwhile, so fetch at full speed; otherwise leave part of the link free."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Outcome of a Save. error: why it failed; empty on success."""

    step: int
    path: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    error: str = ""
    least_s: float = 0.0
    """Seconds that a save takes in the long run; the first bytes of each are not throttled, see pacing.py."""
    link_rate: float = 0.0
    """Bytes per second of the slowest throttled link; 0 if none was throttled."""


@dataclass(frozen=True, kw_only=True)
class Hurry:
    """Nothing trains any more: fetch the rest of the running save at full speed."""


@dataclass(frozen=True, kw_only=True)
class Find:
    """Look for the newest usable checkpoint; a running save that needs a lost task is abandoned."""

    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Outcome of a Find. resume: None if there is no checkpoint yet. error: why none can be used."""

    resume: Resume | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasureCodecs:
    """Measure how fast codecs are on this machine."""


@dataclass(frozen=True, kw_only=True)
class MarkBest:
    """Mark this checkpoint as the best so far."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The job has ended: write the summary, notify every task, exit."""

    exit_code: int
    reason: str
    resigned: bool = False
    """Another chief leads: exit and leave everything to it."""


Action = Answer | Say | Tell | JournalLine | Command | Save | Hurry | Find | MeasureCodecs | MarkBest | Finish
