"""How fast cuts are fetched: at a small share of the link's rate, so that training has the rest (PROTOCOL 1.7).

The fetches themselves measure a link: unthrottled frames show how fast it is. Cut 0 precedes the first step, so it
measures the link undisturbed. From the rate follow the duration of a checkpoint and the smallest interval between two.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardline_chief.rules.flows.checkpointing import SHARE

log = logging.getLogger("shardline_chief.io.pacing")

FREE_BYTES = 16 << 20
"""Bytes that come at full speed: enough for a small model's whole cut."""
MEASURED_BYTES = 4 << 20
"""Fewest bytes by which a link is measured; the first bytes of a connection say little."""
LEAST_RATE = 1e6
"""Bytes per second taken even of the slowest link: below 25 MB/s the share would hold servers' copies for hours."""


class TokenBucket:
    """Bytes that may come now. Pure; the time is an argument."""

    def __init__(self, burst: float = FREE_BYTES) -> None:
        self._burst = burst
        self._level = float(burst)
        self._at_s = -math.inf

    def take(self, nbytes: int, rate: float, now_s: float) -> float:
        """Account for received bytes; returns the seconds to wait before the next ones.

        rate: allowed bytes per second since the last call; 0 = not known yet, so don't wait.
        """
        if rate > 0:
            self._level = min(self._burst, self._level + rate * (now_s - self._at_s))
        self._at_s = now_s
        self._level -= nbytes
        return -self._level / rate if rate > 0 and self._level < 0 else 0.0


class Links:
    """The best rate measured for each server's link, in bytes per second.

    The best counts, since other traffic on a link only makes a fetch look slower.
    """

    def __init__(self) -> None:
        self._best: dict[str, float] = {}

    def note(self, address: str, rate: float) -> None:
        """Note a measured rate, in bytes per second."""
        self._best[address] = max(rate, self._best.get(address, 0.0))

    def rate(self, address: str) -> float:
        """Bytes per second of the link to this address; 0 if not measured yet."""
        return self._best.get(address, 0.0)

    def cap(self, address: str) -> float:
        """Bytes per second that fetching may use of it; 0 if not measured yet."""
        rate = self.rate(address)
        return max(LEAST_RATE, SHARE * rate) if rate else 0.0


class FetchPace:
    """Called with the size of each frame of a shard's cut; waits until the next one may come."""

    def __init__(
        self,
        address: str,
        links: Links,
        bucket: TokenBucket,
        hurry: threading.Event,
        *,
        capped: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """hurry: once set, nothing waits. capped: False = only measure."""
        self._address = address
        self._links = links
        self._bucket = bucket
        self._hurry = hurry
        self._capped = capped
        self._clock = clock
        self._began_s: float | None = None
        self._unhindered: int | None = 0
        """Bytes since the first frame; None once a frame had to wait."""

    def __call__(self, nbytes: int) -> None:
        """Account for one frame, and wait if it came too soon."""
        now_s = self._clock()
        if self._began_s is None:
            # The time to the first frame says nothing about the link.
            self._began_s = now_s
        elif self._unhindered is not None:
            self._unhindered += nbytes
            if self._unhindered >= MEASURED_BYTES and now_s > self._began_s:
                self._links.note(self._address, self._unhindered / (now_s - self._began_s))
        if not self._capped or self._hurry.is_set():
            return
        wait_s = self._bucket.take(nbytes, self._links.cap(self._address), now_s)
        if wait_s > 0:
            self._unhindered = None
            self._hurry.wait(wait_s)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Duration and link rate of fetching one cut."""

    seconds: float = 0.0
    """Actual seconds."""
    least_s: float = 0.0
    """Seconds it would take directly after another fetch, with FREE_BYTES used up."""
    link_rate: float = 0.0
    """Bytes per second of the slowest throttled link; 0 if none is throttled."""


def fetched(
    seconds: Mapping[int, float], nbytes: Mapping[int, int], addresses: Mapping[int, str], links: Links
) -> Fetched:
    """All mappings are by shard; addresses has only the shards whose link is throttled."""
    least_s = 0.0
    for shard, took_s in seconds.items():
        cap = links.cap(addresses[shard]) if shard in addresses else 0.0
        least_s += max(took_s, nbytes[shard] / cap) if cap else took_s
    rates = [rate for address in addresses.values() if (rate := links.rate(address))]
    return Fetched(seconds=sum(seconds.values()), least_s=least_s, link_rate=min(rates, default=0.0))
