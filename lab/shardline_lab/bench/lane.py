"""For `shardline bench net`: throughput of push and pull through a lane, against a server without a chief.

No model and no optimizer state: one flat tensor and plain SGD, to measure the lane itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardline import plugins
from shardline.config import RoleConfig
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.placement import Placement
from shardline.core.plan import make_plan
from shardline.core.spec import ConsistencySpec, ScheduleSpec, TensorSpec
from shardline.core.tensor_bytes import copy_bytes, digest, memory_of, tensor_bytes
from shardline.core.timeouts import Timeouts
from shardline.errors import ProtocolError
from shardline.lanes.negotiated import open_lane
from shardline.rpc.channel import Peers
from shardline.rpc.client import PsControl
from shardline.rpc.messages.configuration import Configuration
from shardline.update import rule
from shardline.waist import Arrival, Memory, Payload, Push, Sender, Want, Whole, octets

SERVERS = "shardline.servers"
"""Entry points for servers without a chief."""
ROW = 1024
SLOWEST_BYTES_PER_S = 1e6
MAX_WAIT_S = 600.0
"""A server refuses to hold a pull for longer."""
MIN_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class LaneFigures:
    """Throughput of a lane in bytes per second, medians."""

    lane: str
    """The lane used, which may not be the one requested."""
    fallbacks: tuple[str, ...] = ()
    """Why better lanes were not used."""
    nbytes: int
    push_bytes_per_s: float
    pull_bytes_per_s: float
    both_s: float
    """Seconds for a push and a pull in one exchange, in full duplex."""
    rounds: int


def pull_wait_s(timeouts: Timeouts, nbytes: int) -> float:
    """Seconds that a server holds a pull for a push of nbytes on its way: over a slow link that takes a while."""
    return min(MAX_WAIT_S, timeouts.server_wait_s + nbytes / SLOWEST_BYTES_PER_S)


def serve_without_chief(config: RoleConfig) -> Any:
    """A parameter server's process object, not started, from the installed entry points."""
    return plugins.installed(SERVERS, "ps", "a parameter server to measure")(config)


@dataclass
class ReusingSink:
    """Receives pulled values into reused memory."""

    memory: dict[int, torch.Tensor] = field(default_factory=dict)
    arrived: int = 0

    def buffer(self, arrival: Arrival) -> memoryview:
        held = self.memory.get(arrival.bucket)
        if held is None or held.numel() != arrival.payload_bytes:
            held = self.memory[arrival.bucket] = torch.empty(arrival.payload_bytes, dtype=torch.uint8)
        return memory_of(held)

    def done(self, arrival: Arrival) -> None:
        self.arrived += arrival.payload_bytes

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        copy_bytes(self.buffer(arrival), octets(payload))
        self.done(arrival)

    take = whole


class LaneProbe:
    """One shard with one tensor on a ps that serves only this measurement.

    config: of the measuring task; its lane is the one to measure.
    """

    def __init__(self, config: RoleConfig, task: str, address: str, *, megabytes: float) -> None:
        timeouts = self._timeouts = config.timeouts
        rows = max(1, int(megabytes * 1e6 / 4 / ROW))
        self.plan = make_plan((TensorSpec(name="bench", shape=(rows, ROW), dtype="float32"),), 1)
        self._control = PsControl(task, address, timeouts, term=0, chief_uuid="", security=config.security)
        self._peers = Peers(timeouts, config.security)
        self._placement = Placement(shard=0, task=task, address=address)
        self.fallbacks: list[str] = []
        self._lane = open_lane(
            config,
            self._peers.get(task, address),
            0,
            self.plan.shards[0],
            on_fallback=lambda name, reason: self.fallbacks.append(f"{name}: {reason}"),
        )
        self._sender = Sender(job="bench", timeline=1, plan_id=self.plan.plan_id, who=Identity(config.task))
        self._sink = ReusingSink()
        self._items = [_payload(number, bucket.elements) for number, bucket in enumerate(self.plan.shards[0].buckets)]
        self.nbytes = sum(item.nbytes for item in self._items)
        self._step = 0

    def prepare(self) -> None:
        """Configure the server and set initial values, which touches every page on both sides."""
        self._control.configure(
            Configuration(
                job="bench",
                timeline=1,
                plan=self.plan,
                shards=(0,),
                rule=rule("SGD", groups=({"lr": 0.1},)),
                schedule=ScheduleSpec(),
                consistency=ConsistencySpec(),
                replicas=1,
                cut_every=0,
                placement=(self._placement,),
                activate=True,
            )
        )
        self._exchange([Push(payloads=Whole(self._items), init=True)], None)
        self.both()

    def push(self) -> float:
        """Seconds for a push without a pull."""
        seconds = self._exchange([self._contribution()], None)
        self._step += 1
        return seconds

    def pull(self) -> float:
        """Seconds for a pull without a push: all parameters of the current step."""
        return self._exchange([], Want(step=self._step, wait_s=self._timeouts.server_wait_s))

    def both(self) -> float:
        """Seconds for a push, the update, and a pull of the result."""
        want = Want(step=self._step + 1, wait_s=pull_wait_s(self._timeouts, self.nbytes))
        seconds = self._exchange([self._contribution()], want)
        self._step += 1
        return seconds

    def measure(self, seconds: float) -> LaneFigures:
        """Each of the three for `seconds`, and at least MIN_ROUNDS times."""
        push, pull, both = (_repeat(call, seconds) for call in (self.push, self.pull, self.both))
        return LaneFigures(
            lane=self._lane.name,
            fallbacks=tuple(self.fallbacks),
            nbytes=self.nbytes,
            push_bytes_per_s=self.nbytes / statistics.median(push),
            pull_bytes_per_s=self.nbytes / statistics.median(pull),
            both_s=statistics.median(both),
            rounds=min(len(push), len(pull), len(both)),
        )

    def _contribution(self) -> Push:
        return Push(payloads=Whole(self._items), step=self._step)

    def _exchange(self, contributions: list[Push], want: Want | None) -> float:
        timeout_s = self._timeouts.total_s + 2 * self.nbytes / SLOWEST_BYTES_PER_S
        before = self._sink.arrived
        start_s = time.perf_counter()
        done = self._lane.exchange(self._sender, contributions, want, self._sink, timeout_s=timeout_s)
        seconds = time.perf_counter() - start_s
        for ack in done.acks:
            if not ack.accepted:
                raise ProtocolError(f"the server did not accept a push: {ack.outcome.name.lower()}: {ack.reason}")
        if done.end is not None and done.end.outcome is not Outcome.SERVED:
            raise ProtocolError(f"the server did not answer a pull: {done.end.outcome.name.lower()}: {done.end.reason}")
        pulled = self._sink.arrived - before
        if want is not None and not self._lane.by_reference and pulled != self.nbytes:
            raise ProtocolError(f"a pull returned {pulled} of {self.nbytes} bytes")
        return seconds

    def close(self) -> None:
        try:
            self._control.stop("measured")
        finally:
            self._lane.close()
            self._control.close()
            self._peers.close()


def _payload(number: int, elements: int) -> Payload:
    data = tensor_bytes(torch.full((elements,), 1e-6))
    return Payload(
        bucket=number,
        dtype="float32",
        elements=elements,
        present=b"",
        data=data,
        raw_bytes=len(data),
        digest=digest(data),
    )


def _repeat(call: Callable[[], float], seconds: float) -> list[float]:
    """Durations of repeated calls, for `seconds` and at least MIN_ROUNDS times; the first one is not counted."""
    call()
    found: list[float] = []
    while len(found) < MIN_ROUNDS or sum(found) < seconds:
        found.append(call())
    return found
