"""A third-party topology in one file: all workers go through the first aggregator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.topology import TOPOLOGIES, Hop, Surroundings, Topology


@TOPOLOGIES.add
@dataclass(frozen=True)
class Hub(Topology):
    """One aggregator for all workers, if it is there."""

    name: ClassVar[str] = "hub"
    meets: ClassVar[bool] = True
    speaks: ClassVar[bool] = False

    def hops(self, around: Surroundings) -> Mapping[int, Hop]:
        hub = around.aggregators.get(0)
        return around.servers if hub is None else dict.fromkeys(around.servers, hub)
