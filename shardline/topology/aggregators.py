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
        """The workers are cut into runs of neighbours, one for each aggregator in the cluster spec.

        Neighbours have neighbouring replicas, and only those can be summed in advance.
        """
        role, _, index = around.task.partition("/")
        places = max(around.places, 1)
        mine = around.aggregators.get(min(int(index) * places // around.workers, places - 1))
        if mine is None or role != "worker":
            return around.servers
        return dict.fromkeys(around.servers, mine)
