"""Flat: every worker talks to every server that has a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.topology.base import Hop, Surroundings, Topology


@dataclass(frozen=True)
class Flat(Topology):
    """Each worker exchanges directly with all servers."""

    name: ClassVar[str] = "flat"
    meets: ClassVar[bool] = False
    speaks: ClassVar[bool] = False

    def hops(self, around: Surroundings) -> Mapping[int, Hop]:
        return around.servers
