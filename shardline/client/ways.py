"""A worker's way to the servers: straight, through an aggregator, or through the first worker of its host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shardline import plugins, topology
from shardline.cluster import ClusterSpec, parse_task
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.orders import JobView, Orders
from shardline.core.placement import Post
from shardline.core.spec import JobSpec
from shardline.observability.metrics import Metrics
from shardline.rpc.link import ChiefLink
from shardline.topology import Hop, Surroundings

log = logging.getLogger("shardline.client")

ENTRY_POINTS = "shardline.aggregators"
"""Entry point `sum`: makes a HostSums from a worker's RoleConfig and an address."""


class HostSums(Protocol):
    """An aggregator within a worker's process."""

    timeline: int

    def start(self) -> str: ...

    def renew(self, view: JobView, who: Identity, members: Sequence[Post]) -> None: ...

    def admit_members(self, members: Sequence[Post]) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


def mates(cluster: ClusterSpec, peers: Sequence[Post], task: str) -> list[Post]:
    """The living workers of this task's host, by addresses and labels, in the order of their indices, with this one."""
    mine = next((post.address for post in peers if post.task == task), "")
    if not mine:
        return []
    host = cluster.machine(mine)
    found = [post for post in peers if post.address and cluster.machine(post.address) == host]
    return sorted(found, key=lambda post: (post.task.partition("/")[0], int(post.task.partition("/")[2])))


class Speaker:
    """A worker's aggregator: idle, unless it is the first worker of its host and not alone there."""

    def __init__(self, config: RoleConfig, metrics: Metrics) -> None:
        def count(peer: str, kind: str, codec: str, nbytes: int) -> None:
            metrics.counter(f"shardline_{kind}_wire_bytes_total", peer=peer, codec=codec, lane="sum").inc(nbytes)

        make: Any = plugins.installed(ENTRY_POINTS, "sum", "the sum of a host's workers (topology local-sum)")
        self._cluster = config.cluster
        self._sums: HostSums = make(config, config.cluster.address(config.task), count=count)
        self._task = ""
        self._lock = threading.Lock()
        """Orders come on the heartbeat thread while the session's thread renews."""

    def start(self) -> str:
        """Serve; returns the address at which the other workers of the host find it."""
        return self._sums.start()

    def renew(self, link: ChiefLink, view: JobView) -> None:
        """Sum for the host's workers in this timeline if this one is the first, else for nobody."""
        with self._lock:
            self._task = link.task
            found = mates(self._cluster, link.orders.peers, link.task)
            if len(found) < 2 or found[0].task != link.task:
                self._sums.leave()
            elif self._sums.timeline != view.timeline:
                self._sums.renew(view, link.identity, found)
            else:
                self._sums.admit_members(found)

    def heard(self, orders: Orders) -> None:
        """Take in that workers have come or gone. Called on the heartbeat thread."""
        with self._lock:
            if self._sums.timeline:
                self._sums.admit_members(mates(self._cluster, orders.peers, self._task))

    def close(self) -> None:
        self._sums.close()


class Ways:
    """A worker's choice among the tasks that its topology allows, as far as it reaches them. Any thread may leave().

    hops: those in use, by shard.
    """

    def __init__(self, config: RoleConfig) -> None:
        self._config = config
        self.hops: Mapping[int, Hop] = {}
        self._left: set[int] = set()
        """Lives of aggregators that did not answer in this timeline."""
        self._met: Mapping[str, Post] = {}
        self._timeline = 0
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

    def choose(self, link: ChiefLink, view: JobView) -> Mapping[int, Hop]:
        """The way for now, by shard: straight to the servers where an aggregator is away, and for first values."""
        if self.speaker is not None:
            self.speaker.renew(link, view)
        if view.timeline != self._timeline:
            self._timeline = view.timeline
            self._left.clear()
        cluster, chosen = self._config.cluster, topology.of(view.job)
        places = cluster.num("aggregator")
        self._met = {} if link.orders.init else {post.task: post for post in link.orders.peers}
        met = [post for post in self._met.values() if post.incarnation not in self._left]
        around = Surroundings(
            task=self._config.task,
            workers=max(1, cluster.num("worker")),
            servers={place.shard: Hop(place.task, place.address) for place in view.placement},
        )
        if chosen.speaks:
            near = mates(cluster, tuple(self._met.values()), link.task)
            first = Hop(near[0].task, near[0].address) if near and near[0] in met else None
            return chosen.hops(replace(around, neighbours=tuple(post.task for post in near), speaker=first))
        aggregators = {parse_task(post.task)[1]: Hop(post.task, post.address) for post in met}
        return chosen.hops(replace(around, aggregators=aggregators, places=places, racks=cluster.racks))

    def lost(self, orders: Orders) -> bool:
        """Return whether an aggregator in use is not among those that the chief names."""
        used = {hop.task for hop in self.hops.values()}
        return any(post.task in used and post not in orders.peers for post in self._met.values())

    def leave(self, hop: Hop) -> bool:
        """Use another way from now on, if this is not a server itself."""
        post = self._met.get(hop.task)
        if post is None:
            return False
        if post.incarnation not in self._left:
            log.warning("%s at %s is away: going to the servers without it", hop.task, hop.address)
            self._left.add(post.incarnation)
        return True
