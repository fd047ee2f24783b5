"""A rank that hosts the chief, the servers and a worker as child processes: a launcher in a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.cli.launcher import LaunchOptions, LocalCluster, common_environment
from shardline.cluster import ClusterSpec, format_address, parse_address
from shardline.host.forkserver import COMMAND, ForkedProcess
from shardline.host.ports import CAN_HOLD, held_port
from shardline_launchers.places import ProcessPlace


@dataclass(frozen=True, kw_only=True)
class HostingOptions(LaunchOptions):
    """Options of the tasks of a cluster that are hosted here; the others are started by the launcher."""

    place: ProcessPlace
    variables: Mapping[str, str] = field(default_factory=dict)
    """The launcher's, which the tasks don't see."""
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
    _told = False

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
        return address

    def _spawn(self, task: str, *, ready_fd: int | None = None) -> None:
        if self._chief_port is not None:
            # Before the chief listens: the others start meanwhile, and dial it until it does.
            self._tell(format_address(self.options.host, self._chief_port.getsockname()[1]))
        super()._spawn(task, ready_fd=ready_fd)

    def _tell(self, address: str) -> None:
        """Leave the address in the launcher's store, once, from a fork that has imported torch for that already."""
        if self._told or self.options.place.meeting is None:
            return
        self._told = True
        command = [*COMMAND, "run", "--by", "torchrun", "--tell", address, "--life-fd", str(self._life_read)]
        environment = {**common_environment(os.environ), **self.options.variables}
        process = self._starter.start(command, environment, (1, 2), [self._life_read])
        threading.Thread(target=self._await_told, args=(process,), name="told", daemon=True).start()

    def _await_told(self, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        if process.wait() and not self._stopping:
            # It has said why. The other ranks wait in vain.
            os.kill(os.getpid(), signal.SIGTERM)
