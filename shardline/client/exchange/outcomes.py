"""Outcomes of an exchange: its figures, and the exceptions that say what the worker has to do next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardline.core.fixed import fixed
from shardline.core.outcome import Outcome
from shardline.errors import NonFiniteError, ProtocolError, ShardlineError
from shardline.waist import Ack, End, Push, Want

log = logging.getLogger("shardline.client")


class Restart(Exception):
    """The step has to start over from Progress (PROTOCOL 1.4.1): timeline, assignment or step changed."""


class Overtaken(Restart):
    """The job has gone on without this worker: its step is closed, and the parameters it wants are gone."""


class Stopped(Exception):
    """The job does not continue; the message names the step."""


class Interrupted(Exception):
    """The session has to check its orders."""


@fixed(kw_only=True)
class ShardTask:
    """One shard's pushes and pull in this step."""

    shard: int
    contributions: Sequence[Push]
    want: Want | None
    patience_s: float = 0.0
    """Seconds that one call may wait for gradients that are still being computed."""
    moves: int | None = None
    """Bytes that it moves at most, each way; None = those of the whole shard."""


@fixed(kw_only=True)
class ShardOutcome:
    acks: tuple[Ack, ...]
    began_s: float
    """All times are of the monotonic clock, in seconds."""
    pushed_s: float
    """When the last push was acknowledged; began_s if nothing was pushed."""
    first_s: float
    """When the first pulled bucket began to arrive; 0 if none did."""
    ended_s: float
    wants_state: bool = False
    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def parts(self, computed_s: float) -> Parts:
        """Time for push, barrier wait and pull, counted from computed_s, when the gradients were complete."""
        began = max(self.began_s, computed_s)
        pushed = max(self.pushed_s, began)
        first = max(self.first_s, pushed)
        return Parts(push_s=pushed - began, wait_s=first - pushed, pull_s=max(self.ended_s, first) - first)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one exchange with one shard."""

    push_s: float
    wait_s: float
    pull_s: float


@fixed(kw_only=True)
class StepFigures:
    """One finished exchange, for metrics and reports."""

    seconds: float
    computed_s: float
    """When the last gradient was complete, by the monotonic clock."""
    outcomes: Mapping[int, ShardOutcome]
    skipped: bool
    """The step was skipped because a gradient was not finite."""
    gap: float | None = None
    """RMS distance between the parameters before and after it; None if it wasn't measured."""

    @property
    def staleness(self) -> int:
        """Staleness at the shard that was furthest ahead."""
        return max((ack.staleness for outcome in self.outcomes.values() for ack in outcome.acks), default=0)

    @property
    def blocked_s(self) -> float:
        """Seconds from the push to the pull at the shard where that took longest: others were waited for."""
        return max((outcome.parts(self.computed_s).wait_s for outcome in self.outcomes.values()), default=0.0)


def rank(error: Exception) -> int:
    """Rank of an error, most informative first: a shard's answer beats the interruption of the other calls."""
    order = (Stopped, NonFiniteError, ProtocolError, ShardlineError, Restart, Interrupted)
    return next((number for number, cls in enumerate(order) if isinstance(error, cls)), 0)


def check_ack(ack: Ack, shard: int) -> None:
    """Return if the push needs no repetition. Raises Stopped, ProtocolError or Restart otherwise."""
    if ack.accepted:
        if ack.mismatch:
            log.error("shard %d: %s", shard, ack.reason)
        return
    if ack.outcome is Outcome.STOPPED:
        raise Stopped(ack.reason)
    if ack.outcome is Outcome.REFUSED:
        raise ProtocolError(f"shard {shard} refused the push: {ack.reason}")
    raise Restart(f"shard {shard}: {ack.outcome.name.lower()}: {ack.reason}")


def check_end(end: End, shard: int) -> None:
    """Return if the pull only has to wait. Raises Stopped, ProtocolError or Restart otherwise."""
    if end.outcome is Outcome.WAITING:
        return
    if end.outcome is Outcome.STOPPED:
        raise Stopped(end.reason)
    if end.outcome is Outcome.REFUSED:
        raise ProtocolError(f"shard {shard} refused the pull: {end.reason}")
    kind = Overtaken if end.outcome is Outcome.OVERTAKEN else Restart
    raise kind(f"shard {shard}: {end.outcome.name.lower()}: {end.reason}")
