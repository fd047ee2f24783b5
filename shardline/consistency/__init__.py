"""Consistency modes. `CONSISTENCIES` has those that users name; `of()` returns the mode for a job's settings."""

from __future__ import annotations

import functools

from shardline.consistency.asynchronous import Asynchronous as Asynchronous
from shardline.consistency.base import Clock as Clock, Consistency as Consistency, Gives as Gives
from shardline.consistency.eager import Eager as Eager, Voted
from shardline.consistency.softsync import SoftSync as SoftSync
from shardline.consistency.ssp import SSP as SSP
from shardline.consistency.voted import VotedSteps as VotedSteps, choices as choices, votes as votes
from shardline.core.spec import ConsistencySpec
from shardline.errors import JobError
from shardline.seams import Table

Sync, Async = Eager, Asynchronous
"""By the names that jobs use."""
CONSISTENCIES: Table[Consistency] = Table("consistency", Eager, Asynchronous, SoftSync, SSP)
RESIDENTS: tuple[type[Consistency], ...] = (Eager, Voted, Asynchronous, SoftSync, SSP)
"""All modes of the library: other settings of a job turn eager steps into voted ones."""


@functools.lru_cache(maxsize=256)
def of(spec: ConsistencySpec) -> Consistency:
    """The mode of a job. Raises JobError for one that does not exist."""
    return CONSISTENCIES.parse(spec.mode).under(spec)


def named(spec: ConsistencySpec) -> str:
    """A job's choice as its user has made it, for messages; the same with a pipeline and without.

    As it is written where it does not exist here: a checkpoint may be of a job with a plugin's.
    """
    try:
        return str(CONSISTENCIES.parse(spec.mode).plain())
    except JobError:
        return spec.mode
