"""What a task's heartbeats say beside its state: figures of its work, read when a heartbeat is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardline.core.status import TaskLinks, Traffic, Usage
from shardline.rpc.messages.fields import to_message
from shardline.rpc.report_queue import PassQueue
from shardline.rpc.v1 import chief_pb2, parameter_server_pb2


@dataclass(frozen=True, kw_only=True)
class BeatFacts:
    """Called on the heartbeat thread; None = this task has none of it."""

    ps: Callable[[], parameter_server_pb2.PsStatusReply] | None = None
    """The status of a parameter server."""
    traffic: Callable[[], Traffic] | None = None
    usage: Callable[[], Usage] | None = None
    links: Callable[[], TaskLinks] | None = None
    passes: PassQueue | None = None
    """Passes of a pipeline, on the clock of time.monotonic()."""

    figures: Callable[[], Mapping[str, float]] | None = None
    """Figures that change with every step."""

    def write(self, beat: chief_pb2.Beat) -> None:
        """Write them into a heartbeat."""
        if self.ps is not None:
            beat.ps.CopyFrom(self.ps())
        if self.traffic is not None:
            beat.traffic.CopyFrom(to_message(parameter_server_pb2.Traffic, self.traffic()))
        if self.usage is not None:
            beat.usage.CopyFrom(to_message(chief_pb2.Usage, self.usage()))
        if self.links is not None:
            beat.links.CopyFrom(to_message(chief_pb2.TaskLinks, self.links()))
        if self.figures is not None:
            beat.figures.update(self.figures())
        if self.passes is not None:
            beat.passes.extend(to_message(chief_pb2.PassReport, one) for one in self.passes.take())
            beat.clock_s = time.monotonic()

    @property
    def waiting(self) -> bool:
        """Whether there is something that another heartbeat should still take."""
        return bool(self.passes)


NOTHING = BeatFacts()
