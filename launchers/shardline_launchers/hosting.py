"""A rank that hosts the chief, the servers and a worker as child processes: a launcher in a launcher."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from typing import Any

from shardline.cli.launcher import LaunchOptions, LocalCluster
from shardline.cluster import ClusterSpec, format_address, parse_address
from shardline.host.ports import CAN_HOLD, held_port
from shardline_launchers.meeting import Teller
from shardline_launchers.places import ProcessPlace

log = logging.getLogger("shardline.launchers")


@dataclass(frozen=True, kw_only=True)
class HostingOptions(LaunchOptions):
    """Options of the tasks of a cluster that are hosted here; the others are started by the launcher."""

    place: ProcessPlace
    bind: str | None = None
    """Interface that the services of the hosted tasks bind to; None = that of their address."""

    @property
    def host(self) -> str:
        return parse_address(self.place.spec.chief)[0]

    def spec(self, chief: str = "") -> ClusterSpec:
        found = self.place.spec.with_address("chief/0", chief or format_address(self.host, 0))
        for task in self.place.hosted:
            found = found if task == "chief/0" else found.with_address(task, format_address(self.host, 0))
        return found

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "bind": self.bind, "exit_with_job": True}


class HostingCluster(LocalCluster):
    """Starts the hosted tasks, and tells the launcher's other processes where the chief is."""

    options: HostingOptions

    def __init__(self, options: HostingOptions) -> None:
        super().__init__(options)
        meeting = options.place.meeting
        self._teller = Teller(meeting, options.timeouts.join_s, _end) if meeting is not None else None

    def tasks(self) -> tuple[str, ...]:
        return self.options.place.hosted

    def start(self) -> None:
        super().start()
        self._tell(self.chief_address)

    def reserved_address(self) -> str:
        address = self.options.spec().chief
        if CAN_HOLD:
            self._chief_port = held_port(self.options.bind or self.options.host)
            address = format_address(self.options.host, self._chief_port.getsockname()[1])
            # The others start meanwhile, and dial it until it listens.
            self._tell(address)
        return address

    def _tell(self, address: str) -> None:
        if self._teller is not None:
            self._teller.tell(address)


def _end(reason: str) -> None:
    """Say why, and end this process as its launcher would: with a checkpoint, if training has begun."""
    log.error("%s", reason)
    os.kill(os.getpid(), signal.SIGTERM)
