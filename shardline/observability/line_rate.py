"""Speed of the network link behind this task's address, if the machine knows it, and who uses it."""

from __future__ import annotations

import logging
import math
import socket
from pathlib import Path

import psutil

from shardline.cluster import parse_address
from shardline.config import environment
from shardline.core.status import PeerBytes, TaskLinks
from shardline.errors import ClusterSpecError, UsageError
from shardline.observability.metrics import Metrics
from shardline.roles import ROLES

log = logging.getLogger("shardline")

MBIT = 1e6 / 8
"""Bytes per megabit."""
INTERFACES = Path("/sys/class/net")


def meter_line(metrics: Metrics, address: str) -> None:
    """Set shardline_link_bytes_per_second if the speed of this task's link is known. Raises UsageError.

    SHARDLINE_LINK_MBIT takes precedence: in containers and virtual machines only the user knows.
    """
    rate = given_rate() or interface_rate(address)
    if rate is not None:
        metrics.gauge("shardline_link_bytes_per_second").set(rate)


def links(metrics: Metrics) -> TaskLinks:
    """What a task has exchanged with each other one, by its metrics; see TaskLinks."""
    line = sum(metrics.sums("shardline_link_bytes_per_second", "task").values())
    if not ROLES[metrics.role].talks:
        return TaskLinks(line_bytes_per_s=line)
    push, pull, parcel = (_moved(metrics, kind) for kind in ("push", "pull", "parcel"))
    return TaskLinks(
        line_bytes_per_s=line,
        peers=tuple(
            PeerBytes(task=peer, out_bytes=push.get(peer, 0.0) + parcel.get(peer, 0.0), in_bytes=pull.get(peer, 0.0))
            for peer in sorted({*push, *pull, *parcel} - {metrics.task})
        ),
    )


def _moved(metrics: Metrics, kind: str) -> dict[str, float]:
    """Bytes by peer: on the wire, or through memory where nothing is sent."""
    raw, wire = (metrics.sums(f"shardline_{kind}_{what}_bytes_total", "peer") for what in ("raw", "wire"))
    return raw | {peer: count for peer, count in wire.items() if count}


def given_rate() -> float | None:
    """SHARDLINE_LINK_MBIT in bytes per second; None if it is not set. Raises UsageError if invalid."""
    text = environment("link_mbit")
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 < found < 1e9:
        raise UsageError(f"SHARDLINE_LINK_MBIT is {text!r}; give a rate in megabits per second, such as 1000")
    return found * MBIT


def has_line(name: str) -> bool:
    """Whether an interface is hardware, or a bond of it: the kernel invents a speed for a container's."""
    if not INTERFACES.is_dir():
        return True
    return (INTERFACES / name / "device").exists() or (INTERFACES / name / "bonding").exists()


def interface_rate(address: str) -> float | None:
    """Bytes per second of the interface that has the host of "host:port"; None if unknown."""
    try:
        host, _ = parse_address(address)
        own = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        names = [
            name
            for name, held in psutil.net_if_addrs().items()
            # IPv6 addresses may include the interface after a %.
            if own.intersection(item.address.partition("%")[0] for item in held) and has_line(name)
        ]
        speeds = psutil.net_if_stats()
    except (ClusterSpecError, OSError) as error:
        log.debug("the line rate of %s is unknown: %s", address, error)
        return None
    known = [speeds[name].speed for name in names if name in speeds and 0 < speeds[name].speed < 2**16 - 1]
    return min(known) * MBIT if known else None
