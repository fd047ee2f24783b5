"""The topology seam: whom a worker talks to for a shard, and what workers do among themselves before that.

An aggregator tree answers hops() with the aggregator above this worker, which speaks the servers' protocol. A group
that adds up among its members before one of them pushes keeps what offer() is given, and hands it round in collect():
there the member that pushes returns the parts of all, the others nothing. All of them pull. Pure, but for what a route
opens itself.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

from shardline.cadence.base import Outgoing
from shardline.seams import Resident


@dataclass(frozen=True)
class Hop:
    """A task to talk to."""

    task: str
    """Such as "ps/0"."""
    address: str
    """HOST:PORT."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a worker knows of its cluster when it opens its lanes."""

    task: str
    """This worker, such as "worker/3"."""
    workers: int
    """Workers of the cluster spec."""
    servers: Mapping[int, Hop]
    """The server that holds each shard, by shard."""


class Route(abc.ABC):
    """One worker's ways to all shards, for one plan and one history. Used by one thread."""

    @abc.abstractmethod
    def hops(self) -> Mapping[int, Hop]:
        """The task to push to and pull from, for every shard."""

    @abc.abstractmethod
    def offer(self, step: int, replica: int, outgoing: Outgoing) -> Outgoing | None:
        """A replica of this worker has its part of a step: what is to be pushed as that replica's; None = not yet.

        Returns at once. Whoever keeps a part copies it, unless Outgoing.keep says that nobody writes to it.
        """

    @abc.abstractmethod
    def collect(self, step: int) -> Mapping[int, Outgoing]:
        """All replicas of this worker have offered theirs: further parts that it has to push, by replica.

        May talk to other workers: its waits have deadlines, and it raises UnreachableError.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free what it opened."""


class Topology(Resident, abc.ABC):
    """Whom a worker talks to."""

    @property
    def streams(self) -> bool:
        """Whether a worker's gradients go to the hops as they are, so that they may leave before all are computed."""
        return False

    @abc.abstractmethod
    def route(self, around: Surroundings) -> Route:
        """The working half; made anew with every plan and history."""
