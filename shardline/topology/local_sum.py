"""Local sum: the workers of one host sum in shared memory, and the first of them exchanges for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.topology.base import Hop, Surroundings, Topology


@dataclass(frozen=True)
class LocalSum(Topology):
    """The first worker of each host sums for the others there, and pulls once for all of them."""

    name: ClassVar[str] = "local-sum"
    meets: ClassVar[bool] = True
    speaks: ClassVar[bool] = True

    def hops(self, around: Surroundings) -> Mapping[int, Hop]:
        """Straight to the servers for a worker that is alone on its host."""
        if len(around.neighbours) < 2 or around.speaker is None:
            return around.servers
        return dict.fromkeys(around.servers, around.speaker)
