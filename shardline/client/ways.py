"""A worker's way to the servers: straight, through an aggregator, or through the first worker of its host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shardline import plugins, topology
from shardline.cluster import parse_address, parse_task
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import JobView, Orders
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink
from shardline.topology import Hop, Route, Surroundings

log = logging.getLogger("shardline.client")

ENTRY_POINTS = "shardline.aggregators"
"""Entry point `sum`: makes a HostSums from a worker's RoleConfig and an address."""


class HostSums(Protocol):
    """An aggregator within a worker's process."""

    timeline: int

    def start(self) -> str: ...

    def renew(self, view: JobView, who: Identity, members: Sequence[Post]) -> None: ...

    def admit_members(self, members: Sequence[Post]) -> None: ...

    def close(self) -> None: ...


def mates(peers: Sequence[Post], task: str) -> list[Post]:
    """The living workers of this task's host, by their addresses, in the order of their indices; this one included."""
    mine = next((post.address for post in peers if post.task == task), "")
    if not mine:
        return []
    host = parse_address(mine)[0]
    found = [post for post in peers if post.address and parse_address(post.address)[0] == host]
    return sorted(found, key=lambda post: (post.task.partition("/")[0], int(post.task.partition("/")[2])))


class Speaker:
    """A worker's aggregator: idle, unless it is the first worker of its host and not alone there."""

    def __init__(self, config: RoleConfig, metrics: Metrics) -> None:
        def count(kind: str, peer: str, nbytes: int) -> None:
            metrics.counter(f"shardline_{kind}_wire_bytes_total", peer=peer, codec="raw", lane="sum").inc(nbytes)

        make: Any = plugins.installed(ENTRY_POINTS, "sum", "the sum of a host's workers (topology local-sum)")
        self._sums: HostSums = make(config, config.cluster.address(config.task), count=count)
        self._members: Sequence[Post] = ()
        self._task = ""
        self._lock = threading.Lock()
        """Orders come on the heartbeat thread while the session's thread renews."""

    def start(self) -> str:
        """Serve; returns the address at which the other workers of the host find it."""
        return self._sums.start()

    def renew(self, view: JobView, who: Identity, orders: Orders) -> None:
        """Sum for the host's workers in this timeline, if this one is the first."""
        with self._lock:
            found, self._task = mates(orders.peers, who.task), who.task
            if len(found) > 1 and found[0].task == who.task and self._sums.timeline != view.timeline:
                self._members = found
                self._sums.renew(view, who, found)

    def heard(self, orders: Orders) -> None:
        """Take in that workers have come or gone. Called on the heartbeat thread."""
        with self._lock:
            found = mates(orders.peers, self._task)
            if self._sums.timeline and found != self._members:
                self._members = found
                self._sums.admit_members(found)

    def close(self) -> None:
        self._sums.close()


class Ways:
    """A worker's choice among the tasks that its topology allows, as far as it reaches them. Any thread may leave().

    hops: of the route in use.
    """

    def __init__(self, config: RoleConfig) -> None:
        self._config = config
        self.hops: Mapping[int, Hop] = {}
        self._left: set[int] = set()
        """Lives of aggregators that did not answer in this timeline."""
        self._met: Mapping[str, Post] = {}
        self._timeline = 0
        self._told = False
        self.speaker: Speaker | None = None
        """Sums for the workers of this host, if the topology says so."""

    def meet(self, job: JobSpec, metrics: Metrics) -> None:
        """The job is known; the worker has not joined."""
        if topology.of(job).speaks:
            self.speaker = Speaker(self._config, metrics)

    def heard(self, orders: Orders) -> None:
        """Take in that workers have come or gone. Called on the heartbeat thread."""
        if self.speaker is not None:
            self.speaker.heard(orders)

    def close(self) -> None:
        if self.speaker is not None:
            self.speaker.close()

    def route(self, link: ChiefLink, view: JobView) -> Route:
        """The way for now: straight to the servers where an aggregator is away, and for first values."""
        if self.speaker is not None:
            self.speaker.renew(view, link.identity, link.orders)
        if view.timeline != self._timeline:
            self._timeline = view.timeline
            self._left.clear()
        cluster, chosen = self._config.cluster, topology.of(view.job)
        places = cluster.num("aggregator")
        if chosen.meets and not (chosen.speaks or places or self._told):
            self._told = True
            log.warning("topology %s, but the cluster has no aggregator: workers go to the servers themselves", chosen)
        self._met = {} if link.orders.init else {post.task: post for post in link.orders.peers}
        met = [post for post in self._met.values() if post.incarnation not in self._left]
        around = Surroundings(
            task=self._config.task,
            workers=max(1, cluster.num("worker")),
            servers={place.shard: Hop(place.task, place.address) for place in view.placement},
        )
        if chosen.speaks:
            near = mates(tuple(self._met.values()), link.task)
            first = Hop(near[0].task, near[0].address) if near and near[0] in met else None
            return chosen.route(replace(around, neighbours=tuple(post.task for post in near), speaker=first))
        aggregators = {parse_task(post.task)[1]: Hop(post.task, post.address) for post in met}
        return chosen.route(replace(around, aggregators=aggregators, places=places))

    def leave(self, hop: Hop) -> bool:
        """Use another way from now on, if this is not a server itself."""
        post = self._met.get(hop.task)
        if post is None:
            return False
        if post.incarnation not in self._left:
            log.warning("%s at %s is away: going to the servers without it", hop.task, hop.address)
            self._left.add(post.incarnation)
        return True
