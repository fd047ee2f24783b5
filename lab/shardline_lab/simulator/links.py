"""Virtual links: the two directions of a machine's network connection, and streams of messages between machines.

The messages that cross a link at the same time share its bandwidth equally, as TCP connections do: first come, first
served would let one worker's push finish long before the others', and so would order them where a real link doesn't. A
message crosses the sender's and the receiver's link at the same time and has arrived when it has crossed both, which is
exact if only one of them is shared.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.errors import UsageError
from shardline_lab.simulator.clock import VirtualClock

SLOWER = 0.9
"""Less than this part of what both links carry is no error of the measurement."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What all links have in common."""

    bytes_per_s: float = math.inf
    """Bandwidth of each direction of a machine's link."""
    latency_s: float = 0.0
    """From one machine to another."""
    pairs: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured bandwidth from one machine to another; then each machine's link is as fast as the fastest of them."""
    trips_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured round trips."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0.0:
            raise UsageError(f"a bandwidth of {self.bytes_per_s:g} bytes/s; give one above 0")

    @property
    def limited(self) -> bool:
        """Whether bytes take time."""
        return bool(self.pairs) or not math.isinf(self.bytes_per_s)

    def latency(self, sender: str, receiver: str) -> float:
        return self.trips_s[sender, receiver] / 2 if self.pairs else self.latency_s

    @functools.cached_property
    def ends(self) -> Mapping[tuple[str, ...], float]:
        """Measured bandwidth of each machine's link, by its name and "out" or "in", and of each pair."""
        found: dict[tuple[str, ...], float] = {}
        for (sender, receiver), rate in self.pairs.items():
            for key in ((sender, "out"), (receiver, "in")):
                found[key] = max(rate, found.get(key, 0.0))
            found[sender, receiver] = rate
        return found


class Link:
    """One direction of a machine's link: the messages on it share its bandwidth equally."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float) -> None:
        self._clock = clock
        self._rate = bytes_per_s
        self._served = 0.0
        """Bytes that a message would have got which has been on the link since it was last idle."""
        self._since_s = 0.0
        self._entered = 0
        self._messages: list[tuple[float, int, Callable[[], None]]] = []
        """By the value of `_served` at which each has crossed."""
        self._due_s = math.inf
        """Time of the event in the clock that counts."""

    def carry(self, nbytes: float, done: Callable[[], None]) -> None:
        """Put a message on the link; done() is called when it has crossed."""
        self._serve()
        self._entered += 1
        heapq.heappush(self._messages, (self._served + nbytes, self._entered, done))
        self._expect()

    def _serve(self) -> None:
        now_s = self._clock.now_s
        if self._messages:
            self._served += (now_s - self._since_s) * self._rate / len(self._messages)
        else:
            self._served = 0.0
        self._since_s = now_s

    def _expect(self) -> None:
        """Enter the next end into the clock. One that is entered too early looks again."""
        left = max(0.0, self._messages[0][0] - self._served) * len(self._messages)
        due_s = self._clock.now_s + left / self._rate
        if due_s < self._due_s:
            self._due_s = due_s
            self._clock.at(due_s, self._end, due_s)

    def _end(self, due_s: float) -> None:
        if due_s != self._due_s:
            return
        self._due_s = math.inf
        self._serve()
        # A hundredth of a byte more, since sums of floats are not exact.
        reached, ended = self._served * (1 + 1e-12) + 0.01, []
        while self._messages and self._messages[0][0] <= reached:
            ended.append(heapq.heappop(self._messages)[2])
        if self._messages:
            self._expect()
        for done in ended:
            done()


class MessageStream:
    """Messages from one machine to another, one after another. links: those to cross; none within one machine."""

    def __init__(self, clock: VirtualClock, links: tuple[Link, ...], latency_s: float) -> None:
        self._clock = clock
        self._links = links
        self.latency_s = latency_s
        self._queue: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._crossing = 0
        """Links that the first message of the queue has still to cross."""

    def send(self, nbytes: float, act: Callable[..., None], *arguments: Any) -> None:
        """Send a message; act(*arguments) is called when it has arrived."""
        if not self._links:
            self._clock.after(self.latency_s, act, *arguments)
            return
        self._queue.append((nbytes, act, arguments))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        self._crossing = len(self._links)
        for link in self._links:
            link.carry(self._queue[0][0], self._crossed)

    def _crossed(self) -> None:
        self._crossing -= 1
        if self._crossing:
            return
        _, act, arguments = self._queue.popleft()
        if self._queue:
            self._begin()
        self._clock.after(self.latency_s, act, *arguments)


class Machines:
    """The links of all machines, by name, and streams between them."""

    def __init__(self, clock: VirtualClock, network: Network) -> None:
        self._clock = clock
        self._network = network
        self._links: dict[tuple[str, ...], Link] = {}

    def stream(self, sender: str, receiver: str) -> MessageStream:
        """A stream between two machines; within one, messages take no time."""
        if sender == receiver:
            return MessageStream(self._clock, (), 0.0)
        network, latency_s = self._network, self._network.latency(sender, receiver)
        if not network.limited:
            return MessageStream(self._clock, (), latency_s)
        keys: list[tuple[str, ...]] = [(sender, "out"), (receiver, "in")]
        if network.pairs and network.pairs[sender, receiver] < SLOWER * min(network.ends[key] for key in keys):
            # Something between them is slower than the links of both, such as that of a rack.
            keys.append((sender, receiver))
        return MessageStream(self._clock, tuple(self._link(key) for key in keys), latency_s)

    def _link(self, key: tuple[str, ...]) -> Link:
        if key not in self._links:
            self._links[key] = Link(self._clock, self._network.ends.get(key, self._network.bytes_per_s))
        return self._links[key]
