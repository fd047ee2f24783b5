"""Flat: every worker talks to every server that has a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shardline.cadence.base import Outgoing
from shardline.topology.base import Hop, Route, Surroundings, Topology


class Direct(Route):
    """Straight to the servers."""

    def __init__(self, servers: Mapping[int, Hop]) -> None:
        self._servers = servers

    def hops(self) -> Mapping[int, Hop]:
        return self._servers

    def offer(self, step: int, replica: int, outgoing: Outgoing) -> Outgoing | None:
        return outgoing

    def collect(self, step: int) -> Mapping[int, Outgoing]:
        return {}

    def close(self) -> None: ...


@dataclass(frozen=True)
class Flat(Topology):
    """Each worker exchanges directly with all servers."""

    name: ClassVar[str] = "flat"

    @property
    def streams(self) -> bool:
        return True

    def route(self, around: Surroundings) -> Route:
        return Direct(around.servers)
