"""OUT/prometheus-targets.json: addresses of the tasks' metrics, for Prometheus's file_sd_configs.

The tasks of `shardline train` use free ports, which no configuration can know; the chief learns them all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from shardline.cluster import format_address, parse_address
from shardline.errors import ClusterSpecError
from shardline.host import files
from shardline_chief.rules.state.membership import Member

log = logging.getLogger("shardline_chief")

NAME = "prometheus-targets.json"
EVERYWHERE = ("0.0.0.0", "::")


class Targets:
    """Keeps the file up to date. A failing disk costs the file until it works again, never the training.

    chief_metrics: address of the chief's own metrics. chief: its address in the cluster.
    """

    def __init__(self, out: Path, *, chief: str, chief_metrics: str) -> None:
        self._path = out / NAME
        self._run = out.name
        self._own = {("chief", reachable(chief_metrics, chief))} if chief_metrics else set()
        self._written: list[tuple[str, str]] | None = None
        self._broken = False

    def show(self, members: Iterable[Member]) -> None:
        """Write the file if the members have changed. Dead tasks stay in it, so that Prometheus shows them as down."""
        found = {
            (member.role, reachable(member.metrics_address, member.address))
            for member in members
            if member.metrics_address and member.state.value != "left"
        }
        self._write(sorted(self._own | found))

    def clear(self) -> None:
        """The job has ended: leave no targets that would count as down."""
        self._write([])

    def _write(self, tasks: list[tuple[str, str]]) -> None:
        if tasks == self._written:
            return
        groups = [{"targets": [where], "labels": {"run": self._run, "service": role}} for role, where in tasks]
        try:
            # Prometheus reads the file whenever it changes, so it must never be half written.
            files.replace(self._path, f"{json.dumps(groups, indent=2)}\n".encode(), durable=False)
            # Set only after success, so that the next call tries again once the disk has room.
            self._written, self._broken = tasks, False
        except OSError as error:
            if not self._broken:
                self._broken = True
                log.error("%s can't be written (%s); training continues without it", self._path, error.strerror)


def reachable(metrics_address: str, address: str) -> str:
    """A task's metrics address as seen from other hosts: "0.0.0.0" is replaced by the host in `address`."""
    try:
        host, port = parse_address(metrics_address)
        return format_address(parse_address(address)[0], port) if host in EVERYWHERE else metrics_address
    except ClusterSpecError:
        return metrics_address
