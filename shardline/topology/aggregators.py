"""Aggregators: the workers of a rack exchange with one task there, which exchanges with the servers for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.topology.base import Hop, Surroundings, Topology


@dataclass(frozen=True)
class Aggregators(Topology):
    """Each worker exchanges with an aggregator, which sums for several; with the servers while that one is away."""

    name: ClassVar[str] = "aggregators"
    meets: ClassVar[bool] = True
    speaks: ClassVar[bool] = False

    def hops(self, around: Surroundings) -> Mapping[int, Hop]:
        """The workers of a rack are cut into runs of neighbours, one for each aggregator of this rack.

        All are in one rack where the cluster spec names none. Neighbours have neighbouring replicas, and only those
        can be summed in advance.
        """
        role, _, index = around.task.partition("/")
        rack = around.racks.get(around.task)
        workers, places = (
            [number for number in range(count) if around.racks.get(f"{kind}/{number}") == rack]
            for kind, count in (("worker", around.workers), ("aggregator", around.places))
        )
        before = sum(number < int(index) for number in workers)
        run = min(before * len(places) // max(1, len(workers)), len(places) - 1)
        mine = around.aggregators.get(places[run]) if places else None
        if mine is None or role != "worker":
            return around.servers
        return dict.fromkeys(around.servers, mine)
