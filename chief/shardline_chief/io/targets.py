"""OUT/prometheus-targets.json: addresses of the tasks' metrics, for Prometheus's file_sd_configs.

The tasks of `shardline train` use free ports, which no configuration can know; the chief learns them all.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
from collections.abc import Collection, Iterable
from pathlib import Path
from urllib.parse import unquote

from shardline.cluster import format_address, parse_address
from shardline.errors import ClusterSpecError
from shardline.host import files
from shardline.host.ports import on_this_host
from shardline.host.printable import printable
from shardline.security import is_loopback
from shardline_chief.rules.state.membership import Member

log = logging.getLogger("shardline_chief")

NAME = "prometheus-targets.json"
EVERYWHERE = ("0.0.0.0", "::")
RESOLVE_S = 2.0
"""Seconds in which the name of a host has to be resolved."""


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


async def own_metrics(metrics_address: str, address: str, peer: str, known: Collection[str]) -> str:
    """The metrics address that a task gives when it joins, or "" if it may be another's.

    Prometheus goes to these addresses with its credentials. So the host must be the one that the task dials from, or
    be in the cluster spec. address: of the task's services, "" = none. peer: gRPC's word for where it dials from.
    known: hosts in the cluster spec.
    """
    try:
        host, port = parse_address(metrics_address)
        if host in EVERYWHERE:
            host = parse_address(address)[0] if address else _dialled_from(peer)
            metrics_address = metrics_address if address else format_address(host, port)
    except ClusterSpecError:
        return ""
    here = port > 0 and (host in known or await _dials_from(host, _dialled_from(peer)))
    return metrics_address if here else ""


def tell_left_out(task: str, peer: str, metrics_address: str) -> None:
    """Log that own_metrics() has found an address that may be another's."""
    left_out = "they are left out of the status and of prometheus-targets.json"
    shown = printable(metrics_address)
    if is_loopback(shown.rpartition(":")[0].strip("[]")):
        # As by default: no reason to warn of each task of a cluster.
        log.info("the metrics of %s at %s are for its own machine only; --host opens them: %s", task, shown, left_out)
        return
    log.warning(
        "%s joined from %s, and its metrics are to be at %s, which may be another's: %s; give an address that it dials "
        "from, or one of the cluster spec",
        *(task, peer, shown, left_out),
    )


async def _dials_from(host: str, caller: str) -> bool:
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return False
    addresses = {_plain(str(item[4][0])) for item in found}
    # On one machine a task may be reached by another of its addresses.
    return caller in addresses or (is_loopback(caller) and all(map(on_this_host, addresses)))


def _dialled_from(peer: str) -> str:
    """The IP address in gRPC's "ipv4:10.0.0.7:4711" or "ipv6:%5Bfe80::1%5D:4711"; "" if there is none."""
    kind, _, rest = unquote(peer).partition(":")
    return _plain(rest.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else ""


def _plain(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


def reachable(metrics_address: str, address: str) -> str:
    """A task's metrics address as seen from other hosts: "0.0.0.0" is replaced by the host in `address`."""
    try:
        host, port = parse_address(metrics_address)
        return format_address(parse_address(address)[0], port) if host in EVERYWHERE else metrics_address
    except ClusterSpecError:
        return metrics_address
