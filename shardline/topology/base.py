"""The topology seam: which task a worker talks to for a shard, and what workers exchange among themselves before that.

For an aggregator tree, hops() returns the aggregator above this worker, which speaks the servers' protocol. In a group
that sums among its members before one of them pushes, offer() stores the part and collect() exchanges them: for the
member that pushes it returns the parts of all, for the others nothing. All of them pull. Pure, except for connections
that a route opens itself.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardline.cadence.base import Outgoing
from shardline.seams import Resident


@dataclass(frozen=True)
class Hop:
    """A task to talk to."""

    task: str
    """Such as "ps/0" or "aggregator/1"."""
    address: str
    """HOST:PORT."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """A worker's view of its cluster when it opens its lanes."""

    task: str
    """This worker, such as "worker/3"."""
    workers: int
    """Number of workers in the cluster spec."""
    servers: Mapping[int, Hop]
    """The server of each shard, by shard."""
    aggregators: Mapping[int, Hop] = field(default_factory=dict)
    """The living aggregators that this worker can reach, by index."""
    places: int = 0
    """Number of aggregators in the cluster spec."""
    neighbours: tuple[str, ...] = ()
    """Where workers are aggregators: the living ones of this host, in order, with this one."""
    speaker: Hop | None = None
    """The first of them; None if this worker can't reach it."""


class Route:
    """One worker's ways to all shards, for one plan and one timeline: here straight to these. Used by one thread."""

    def __init__(self, hops: Mapping[int, Hop]) -> None:
        self._hops = hops

    def hops(self) -> Mapping[int, Hop]:
        """The task to push to and pull from, for every shard."""
        return self._hops

    def offer(self, step: int, replica: int, outgoing: Outgoing) -> Outgoing | None:
        """Take a replica's part of a step; returns what to push as that replica's, None = nothing yet.

        Returns at once. A route that keeps the part copies it, unless Outgoing.keep is set.
        """
        return outgoing

    def collect(self, step: int) -> Mapping[int, Outgoing]:
        """Further parts that this worker has to push, by replica, once all its replicas have offered theirs.

        May talk to other workers: its waits have deadlines, and it raises UnreachableError.
        """
        return {}

    def close(self) -> None:
        """Free everything it opened."""


class Topology(Resident, abc.ABC):
    """Which task a worker talks to for each shard."""

    meets: ClassVar[bool]
    """Whether workers may exchange with aggregators, of which the chief then tells them."""
    speaks: ClassVar[bool]
    """Whether workers are aggregators themselves, the first of each host for all there."""

    @property
    def streams(self) -> bool:
        """Whether a worker's gradients go to the hops unchanged, so that they may leave before all are computed."""
        return False

    @abc.abstractmethod
    def route(self, around: Surroundings) -> Route:
        """The worker's route; a new one for every plan and timeline."""
