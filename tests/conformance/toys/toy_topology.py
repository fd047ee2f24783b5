"""A third-party topology in one file: worker 0 pushes for all workers of its process, the others only pull.

A real group on one host would use its own sockets; here the workers are threads that share a dictionary.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from shardline.cadence import Outgoing
from shardline.errors import UnreachableError
from shardline.topology import TOPOLOGIES, Hop, Route, Surroundings, Topology

PATIENCE_S = 20.0


class Table:
    """Parts handed over, by step and replica."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: dict[int, dict[int, Outgoing]] = {}

    def clear(self) -> None:
        with self._changed:
            self._parts.clear()

    def give(self, step: int, replica: int, part: Outgoing) -> None:
        with self._changed:
            self._parts.setdefault(step, {})[replica] = part
            self._changed.notify_all()

    def take(self, step: int, count: int) -> Mapping[int, Outgoing]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._parts.get(step, {})) == count, PATIENCE_S):
                raise UnreachableError(f"step {step}: {len(self._parts.get(step, {}))} of {count} parts came")
            return dict(self._parts[step])


TABLE = Table()


class Together(Route):
    """To the servers; gradients through worker 0."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    def hops(self) -> Mapping[int, Hop]:
        return self._around.servers

    def offer(self, step: int, replica: int, outgoing: Outgoing) -> Outgoing | None:
        copies = {name: value.detach().clone() for name, value in outgoing.values.items()}
        buffers = {name: value.clone() for name, value in outgoing.buffers.items()}
        TABLE.give(step, replica, replace(outgoing, values=copies, buffers=buffers, keep=True))
        return None

    def collect(self, step: int) -> Mapping[int, Outgoing]:
        return TABLE.take(step, self._around.workers) if self._around.task == "worker/0" else {}

    def close(self) -> None:
        pass


@TOPOLOGIES.add
@dataclass(frozen=True)
class Group(Topology):
    """One worker pushes what all workers have computed, one replica each."""

    name: ClassVar[str] = "group"
    meets: ClassVar[bool] = False
    speaks: ClassVar[bool] = False

    def route(self, around: Surroundings) -> Route:
        return Together(around)
