"""How fast the line of this task's address is, as far as the machine knows."""

from __future__ import annotations

import logging
import math
import socket

import psutil

from shardline.cluster import parse_address
from shardline.config import environment
from shardline.errors import ClusterSpecError, UsageError
from shardline.metrics import Metrics

log = logging.getLogger("shardline")

MBIT = 1e6 / 8
"""Bytes of a megabit."""
INVENTED = ("lo", "veth", "docker", "br-", "virbr", "tap", "tun", "cni", "flannel", "cali")
"""Beginnings of interface names without a line of their own: the kernel makes up a speed for some of them."""


def meter_line(metrics: Metrics, address: str) -> None:
    """Set shardline_link_bytes_per_second where the line of this task's address is known. Raises UsageError.

    SHARDLINE_LINK_MBIT comes first: in containers and virtual machines only a person knows.
    """
    rate = given_rate() or interface_rate(address)
    if rate is not None:
        metrics.gauge("shardline_link_bytes_per_second").set(rate)


def given_rate() -> float | None:
    """SHARDLINE_LINK_MBIT in bytes per second; None where it is not set. Raises UsageError."""
    text = environment("link_mbit")
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 < found < 1e9:
        raise UsageError(f"SHARDLINE_LINK_MBIT is {text!r}; give the line's megabits per second, such as 1000")
    return found * MBIT


def interface_rate(address: str) -> float | None:
    """Bytes per second of the interface that has the host of "host:port"; None where nobody knows."""
    try:
        host, _ = parse_address(address)
        own = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        names = [
            name
            for name, held in psutil.net_if_addrs().items()
            # IPv6 addresses may carry the interface behind a %.
            if own.intersection(item.address.partition("%")[0] for item in held) and not name.startswith(INVENTED)
        ]
        speeds = psutil.net_if_stats()
    except (ClusterSpecError, OSError) as error:
        log.debug("the line rate of %s is not known: %s", address, error)
        return None
    known = [speeds[name].speed for name in names if name in speeds and 0 < speeds[name].speed < 2**16 - 1]
    return min(known) * MBIT if known else None
