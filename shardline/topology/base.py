"""The topology seam: which task a worker talks to for a shard. Pure."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

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
    racks: Mapping[str, str] = field(default_factory=dict)
    """The rack of each task of the cluster spec that names it."""
    neighbours: tuple[str, ...] = ()
    """Where workers are aggregators: the living ones of this host, in order, with this one."""
    speaker: Hop | None = None
    """The first of them; None if this worker can't reach it."""


class Topology(Resident, abc.ABC):
    """Which task a worker talks to for each shard."""

    meets: ClassVar[bool]
    """Whether workers may exchange with aggregators, of which the chief then tells them."""
    speaks: ClassVar[bool]
    """Whether workers are aggregators themselves, the first of each host for all there."""

    @abc.abstractmethod
    def hops(self, around: Surroundings) -> Mapping[int, Hop]:
        """The task to push to and pull from, for every shard: a server, or who speaks the servers' protocol."""
