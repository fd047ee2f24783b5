"""Flat: every worker talks to every server that has a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardline.topology.base import Route, Surroundings, Topology


@dataclass(frozen=True)
class Flat(Topology):
    """Each worker exchanges directly with all servers."""

    name: ClassVar[str] = "flat"
    meets: ClassVar[bool] = False
    speaks: ClassVar[bool] = False

    @property
    def streams(self) -> bool:
        return True

    def route(self, around: Surroundings) -> Route:
        return Route(around.servers)
