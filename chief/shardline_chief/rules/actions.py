"""What the chief's rules decide to do; control.py does it, in this order. Plain values, so that tests can read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardline.core.placement import Placement
from shardline.core.plan import Plan
from shardline.core.spec import JobSpec
from shardline.errors import ShardlineError


class Resume(Protocol):
    """A checkpoint to go on from."""

    @property
    def step(self) -> int:
        """Step (sync) or applied updates (async) it was taken at."""
        ...

    @property
    def path(self) -> str:
        """Its folder, for sentences."""
        ...

    @property
    def cursor(self) -> Mapping[str, Any]:
        """Data cursor of asynchronous training."""
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each shard of the plan it was written with."""
        ...

    def check(self, job: JobSpec) -> Sequence[str]:
        """What the job does otherwise than the one it is of, a phrase each.

        Raises CheckpointError where it is of another job, with the difference named.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Reply to a call that waits. `ticket` is the caller's own object."""

    ticket: Any
    value: Any


@dataclass(frozen=True, kw_only=True)
class Tell:
    """A sentence for the chief's own log alone, since it comes again and again: how long a wait still goes on."""

    sentence: str


@dataclass(frozen=True, kw_only=True)
class Say:
    """A sentence for the event log. level: "info", "warning" or "error"."""

    kind: str
    sentence: str
    level: str = "info"
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JournalLine:
    """A line of the journal, on disk before the actions that follow."""

    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lead:
    """Take command of every ps that will hold shards; commands go to these from now on."""

    addresses: Mapping[str, str]
    """Where each answers, by task."""


@dataclass(frozen=True, kw_only=True)
class Configure:
    """Give every ps its shards."""

    job: JobSpec
    plan: Plan
    timeline: int
    placement: tuple[Placement, ...]
    keep: frozenset[int] = frozenset()
    """Shards whose present values stay; the others' are made anew."""
    keep_standbys: frozenset[int] = frozenset()
    """Shards whose standbys follow them where they are, and stay; the others are copied anew."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Living incarnations by task, to every ps."""

    timeline: int
    members: Mapping[str, int]
    keys: Mapping[str, bytes] = field(default_factory=dict)
    """By task, what its messages' secret is known by."""


@dataclass(frozen=True)
class Promotion:
    """A standby that is to be a primary: the server that holds it, and the appointment that it was copied for."""

    task: str
    appointment: int = 0


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Make standbys the primaries of their shards, in a history of their own."""

    timeline: int
    shards: Mapping[int, Promotion]


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Fill every shard, but those to keep, from the checkpoint that the run goes on from."""

    timeline: int
    plan: Plan
    placement: tuple[Placement, ...]
    keep: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Activate:
    """Admit pushes and pulls."""

    timeline: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut at a step; result per ps: (passed, highest step)."""

    timeline: int
    step: int
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Release:
    """Forget a cut."""

    timeline: int
    step: int


@dataclass(frozen=True, kw_only=True)
class AskStatus:
    """Status of every ps."""


Order = Lead | Configure | Members | Promote | Restore | Activate | Cut | Release | AskStatus


@dataclass(frozen=True, kw_only=True)
class Command:
    """An order to every ps. Commands are carried out one after another, each on all ps at once."""

    number: int
    order: Order


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What each ps answered, by task; a task is in one of the two."""

    values: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, ShardlineError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Save:
    """Fetch the cut that all shards hold, and commit it as a checkpoint."""

    step: int
    timeline: int
    plan: Plan
    job: JobSpec
    placement: tuple[Placement, ...]
    cursor: Mapping[str, Any]
    urgent: bool = False
    """Nothing trains meanwhile, so it is fetched as fast as it comes; else a share of the link is left alone."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What became of a Save. error: the sentence where it failed."""

    step: int
    path: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    error: str = ""
    least_s: float = 0.0
    """Seconds it takes in the long run; the first bytes of one are not held back, see pacing.py."""
    link_rate: float = 0.0
    """Bytes per second of the slowest link that was spared; 0 where none was."""


@dataclass(frozen=True, kw_only=True)
class Hurry:
    """Nothing trains any more: what is being saved is fetched as fast as it comes from here on."""


@dataclass(frozen=True, kw_only=True)
class Find:
    """Look for the newest checkpoint that can be gone back to; a save that waits for these tasks is given up."""

    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What Find found. resume: None where there is no checkpoint yet; error: the sentence where none can be used."""

    resume: Resume | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class MarkBest:
    """Remember that this checkpoint is the best so far."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The job has ended: write the summary, tell every task, go."""

    exit_code: int
    reason: str
    resigned: bool = False
    """Another chief leads: leave everything to it, and go."""


Action = Answer | Say | Tell | JournalLine | Command | Save | Hurry | Find | MarkBest | Finish
