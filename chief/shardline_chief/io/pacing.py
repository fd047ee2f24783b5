"""How fast cuts are fetched: a small share of what the link gives, so that training has the rest (PROTOCOL 1.7).

A link's rate is measured by the fetches themselves: whatever comes without waiting tells how fast it can come. Cut 0
comes before the first step and measures it undisturbed. From that follows how long a checkpoint takes, and how many
steps must lie between two of them.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shardline.cluster import parse_address
from shardline.errors import ClusterSpecError
from shardline_chief.rules.intervals import SHARE

log = logging.getLogger("shardline_chief.io.pacing")

FREE_BYTES = 16 << 20
"""So much comes at full speed: what small models have is there before anybody notices."""
MEASURED_BYTES = 4 << 20
"""A link is judged by no less than this; the first bytes of a connection say little."""
LEAST_RATE = 1e6
"""Bytes per second that are taken of the slowest link: below 25 MB/s the share would keep servers' copies for hours."""


class Wakeable(Protocol):
    """The part of threading.Event that pacing uses."""

    def is_set(self) -> bool:
        """Whether nothing is to be waited for any more."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait that long, or until it is set."""
        ...


class TokenBucket:
    """Bytes that may come now. Pure: the time is told."""

    def __init__(self, burst: float = FREE_BYTES) -> None:
        self._burst = burst
        self._level = float(burst)
        self._at_s = -math.inf

    def take(self, nbytes: int, rate: float, now_s: float) -> float:
        """Account for bytes that came; returns the seconds after which the next may come.

        rate: bytes per second in force since the last call; 0 = not known yet, so nothing is waited for.
        """
        if rate > 0:
            self._level = min(self._burst, self._level + rate * (now_s - self._at_s))
        self._at_s = now_s
        self._level -= nbytes
        return -self._level / rate if rate > 0 and self._level < 0 else 0.0


class Links:
    """The best rate seen of each server's link, in bytes per second.

    The best, since whatever else uses a link only makes a fetch look slower.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._best: dict[str, float] = {}

    def note(self, address: str, rate: float) -> None:
        """A measured rate."""
        self._best[address] = max(rate, self._best.get(address, 0.0))

    def rate(self, address: str) -> float:
        """Bytes per second of the link to this address; 0 while it was not measured."""
        return self._best.get(address, 0.0)

    def cap(self, address: str) -> float:
        """Bytes per second that may be taken of it; 0 while it was not measured."""
        rate = self.rate(address)
        return max(LEAST_RATE, self._share * rate) if rate else 0.0


class FetchPace:
    """Called with the size of each frame of one shard's cut; waits until the next may come."""

    def __init__(
        self,
        address: str,
        links: Links,
        bucket: TokenBucket,
        hurry: Wakeable,
        *,
        capped: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """hurry: once set nothing is waited for. capped: False = only measure."""
        self._address = address
        self._links = links
        self._bucket = bucket
        self._hurry = hurry
        self._capped = capped
        self._clock = clock
        self._began_s: float | None = None
        self._unhindered: int | None = 0
        """Bytes since the first frame; None once something was waited for."""

    def __call__(self, nbytes: int) -> None:
        """A frame came."""
        now_s = self._clock()
        self._measure(nbytes, now_s)
        if not self._capped or self._hurry.is_set():
            return
        wait_s = self._bucket.take(nbytes, self._links.cap(self._address), now_s)
        if wait_s > 0:
            self._unhindered = None
            self._hurry.wait(wait_s)

    def _measure(self, nbytes: int, now_s: float) -> None:
        if self._began_s is None:
            # How long the first frame took is not the link's doing.
            self._began_s = now_s
        elif self._unhindered is not None:
            self._unhindered += nbytes
            if self._unhindered >= MEASURED_BYTES and now_s > self._began_s:
                self._links.note(self._address, self._unhindered / (now_s - self._began_s))


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """What fetching one cut came to."""

    seconds: float = 0.0
    """As it was."""
    least_s: float = 0.0
    """As it would be right after another one, with nothing left of FREE_BYTES."""
    link_rate: float = 0.0
    """Bytes per second of the slowest link among those that are spared; 0 where none is."""


def fetched(
    seconds: Mapping[int, float], nbytes: Mapping[int, int], addresses: Mapping[int, str], links: Links
) -> Fetched:
    """All by shard; addresses has those whose links are spared."""
    least_s = 0.0
    for shard, took_s in seconds.items():
        cap = links.cap(addresses[shard]) if shard in addresses else 0.0
        least_s += max(took_s, nbytes[shard] / cap) if cap else took_s
    rates = [rate for address in addresses.values() if (rate := links.rate(address))]
    return Fetched(seconds=sum(seconds.values()), least_s=least_s, link_rate=min(rates, default=0.0))


def on_this_machine(address: str) -> bool:
    """Whether "host:port" is here: then training has no link to lose. False where nobody can tell."""
    try:
        host, port = parse_address(address)
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ClusterSpecError:
        return False
    except ValueError:
        log.debug("%s is a host name; its address decides whether it shares the link", address)
    try:
        family, kind, number, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            # Sends nothing: the kernel only chooses the address that it would send from.
            probe.connect(target)
            return bool(probe.getsockname()[0] == probe.getpeername()[0])
    except OSError as error:
        log.debug("%s: %s", address, error)
        return False
