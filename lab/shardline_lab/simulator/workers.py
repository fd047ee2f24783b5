"""Virtual workers: compute, push, pull, and again, at the position that the worker's half of the mode knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from shardline.consistency.server import NumberedPush
from shardline.consistency.worker import WorkerHalf
from shardline.core.gradients import Gradient
from shardline.core.outcome import Outcome
from shardline.core.reduce import Block
from shardline.storage.shard import Hyper
from shardline_lab.simulator.clock import VirtualClock
from shardline_lab.simulator.links import MessageStream
from shardline_lab.simulator.result import RunCounts
from shardline_lab.simulator.servers import NOTHING, PulledBucket, VirtualServer

FORWARD = 1 / 3
"""Share of the forward pass in a pass: the backward pass computes twice as much."""
Place = tuple[int, int]
"""(server, bucket)."""


class Gradients(Protocol):
    """What a worker computes with, if not only the timing is simulated."""

    def pulled(self, values: Mapping[Place, torch.Tensor]) -> None:
        """The worker has these parameters."""

    def compute(self, step: int, replicas: Sequence[int]) -> float:
        """Compute the contributions of a step, or of the next batch; returns the mean loss."""

    def contribution(self, place: Place, replica: int) -> Gradient:
        """A bucket of what was computed."""

    def hyper(self, replica: int) -> Hyper:
        """Hyper-parameters that are sent with it."""


class SimulatedJob(Protocol):
    """Parts of a simulation that its workers use."""

    clock: VirtualClock
    tally: RunCounts
    servers: list[VirtualServer]
    overlap: bool
    """Gradients leave during the backward pass."""
    exchange_s: float
    sums_blocks: bool
    numbered: bool

    def draws_in(self, step: int) -> int: ...

    def ahead_in(self, step: int) -> float: ...


class VirtualWorker:
    """One worker. Every event of it belongs to one of its lives, and does nothing once that has ended.

    streams: to and from the servers. gradients: None = only the timing. gates: take in its pushes where it exchanges
    with an aggregator, by server; the streams lead there then.
    """

    def __init__(
        self,
        index: int,
        job: SimulatedJob,
        half: WorkerHalf,
        times: Iterator[float],
        streams: tuple[Sequence[MessageStream], Sequence[MessageStream]],
        gradients: Gradients | None = None,
        gates: Mapping[int, Callable[..., None]] = MappingProxyType({}),
    ) -> None:
        self.index = index
        self.task = f"worker/{index}"
        self.owned: tuple[int, ...] = ()
        """Replicas to compute; none = nothing to do."""
        self.alive = True
        self.idle = True
        """It has not begun in this life."""
        self.incarnation = 1
        self.busy_s = 0.0
        self.passes = 0
        """Passes done, and their time in `busy_s`; those of a life that ended meanwhile are not in it."""
        self._job = job
        self._half = half
        self._times = times
        self._up, self._down = streams
        self._gradients = gradients
        self._life = 0
        self._owed: Sequence[int] = ()
        self._blocks_of: tuple[Sequence[int], Sequence[Block]] = ((), ())
        """What was sent for these replicas before: finding the blocks takes long."""
        self._pushed = False
        """The pulls that are open follow a push."""
        self._missing = 0
        self._spent = (0.0, 0)
        """Seconds and number of the passes under way."""
        self._sent_s = 0.0
        """When the last gradient was computed."""
        self._arrived_s: dict[int, float] = {}
        """When the parameters of a bucket arrived from all servers."""
        self._arrived: dict[Place, PulledBucket] = {}
        self._counts = Counter[int]()
        """Buckets of the open push that have arrived, by server."""
        servers = [*job.servers[index % len(job.servers) :], *job.servers[: index % len(job.servers)]]
        # Each worker begins at another server, so that they don't all send to the same one.
        self._order = servers
        self._buckets = sum(len(server.buckets) for server in servers)
        self._most_buckets = max(len(server.buckets) for server in servers)
        self._targets = [
            [
                (one, self._up[one.number], one.plans[bucket].push_bytes, gates.get(one.number))
                for one in servers
                if bucket < len(one.buckets)
            ]
            for bucket in range(self._most_buckets)
        ]
        """By bucket: the servers that have it, how to reach them, the bytes of a contribution, and its gate."""

    @property
    def step(self) -> int:
        """The step that it computes or exchanges."""
        return self._half.step

    # Lives

    def begin(self) -> None:
        """Find the job's position and pull the parameters; drops everything that is under way."""
        self._life += 1
        if not self.owned:
            return
        self.idle = False
        asked = self._half.asks_for(self.owned)
        standings = {server.number: server.standing(self.task, self.incarnation, asked) for server in self._job.servers}
        self._owed = sorted(self._half.located(standings, self.owned))
        self._pushed = False
        self._expect()
        for server in self._job.servers:
            server.settle()
        self._job.clock.after(max(stream.latency_s for stream in self._up), self._ask, self._life)

    def _ask(self, life: int) -> None:
        if life != self._life:
            return
        for server in self._order:
            for bucket in reversed(range(len(server.buckets))):
                self._pull(server, bucket, self._half.exact)

    def die(self) -> None:
        self._life += 1
        self.alive, self.idle = False, True

    def revive(self, half: WorkerHalf) -> None:
        """Start again, as a new process."""
        self.alive = True
        self.incarnation += 1
        self._half = half

    # Computing

    def _compute(self, *, goes_on: bool) -> None:
        """Compute a step. goes_on: the one after that which this life has just pushed."""
        job, now_s = self._job, self._job.clock.now_s
        draws = self._job.draws_in(self._half.step)
        each = [sum(next(self._times) for _ in range(draws)) if draws > 1 else next(self._times) for _ in self._owed]
        whole_s = sum(each) if len(each) > 1 else each[0]
        self._spent = whole_s, len(each) * draws
        if self._gradients is not None:
            job.tally.losses.append((now_s, self._gradients.compute(self._half.step, self._owed)))
        self._counts.clear()
        blocks = self._blocks()
        if not job.overlap:
            ahead_s = job.ahead_in(self._half.step) * whole_s if goes_on else 0.0
            # Passes that ran since the last gradient left, while the exchange was under way.
            ahead_s = min(ahead_s, now_s + job.exchange_s - self._sent_s)
            ends_s = now_s + job.exchange_s + whole_s - ahead_s
            job.clock.at(ends_s, self._send, self._life, range(self._most_buckets), blocks)
            return
        # The forward pass waits for parameters layer by layer; gradients leave during the backward pass.
        backward_s = (1 - FORWARD) * each[-1]
        forward_s = FORWARD * each[0]
        # When the first forward pass ends: it needs the buckets in the reverse of the order in which they are sent.
        end_s = self._sent_s
        for bucket in reversed(range(self._most_buckets)):
            end_s = max(end_s, self._arrived_s.get(bucket, 0.0)) + forward_s / self._most_buckets
        begins_s = end_s + job.exchange_s + whole_s - forward_s - backward_s
        for bucket in range(self._most_buckets):
            ready_s = begins_s + backward_s * (bucket + 1) / self._most_buckets
            job.clock.at(ready_s, self._send, self._life, (bucket,), blocks)

    def _blocks(self) -> Sequence[Block]:
        if self._blocks_of[0] != self._owed:
            half, owed = self._half, self._owed
            summed = self._job.sums_blocks
            blocks = half.blocks(owed) if summed else [Block(half.slot(replica), 1) for replica in owed]
            self._blocks_of = owed, blocks
        return self._blocks_of[1]

    def _send(self, life: int, buckets: Sequence[int], blocks: Sequence[Block]) -> None:
        if life != self._life:
            return
        self._sent_s = self._job.clock.now_s
        if not self._pushed:
            self._pushed = True
            self._expect()
        if buckets[-1] == self._most_buckets - 1:
            self.busy_s += self._spent[0]
            self.passes += self._spent[1]
        step = self._half.step
        for bucket in buckets:
            for server, up, push_bytes, gate in self._targets[bucket]:
                nbytes = push_bytes[step % len(push_bytes)] * len(blocks)
                if gate is None:
                    self._job.tally.push_bytes += nbytes
                up.send(nbytes, gate or VirtualWorker._take_in, self, life, server, bucket, blocks)

    # At a server

    def _take_in(self, life: int, server: VirtualServer, bucket: int, blocks: Sequence[Block]) -> None:
        """A bucket of this worker's push has arrived at a server; its pull follows."""
        if life != self._life:
            return
        if not self._job.numbered:
            self.count(server, bucket, blocks)
            self._pull(server, bucket, self._half.target)
        else:
            self._counts[server.number] += 1
            if self._counts[server.number] == len(server.buckets):
                self._push(server)
                for number in reversed(range(len(server.buckets))):
                    self._pull(server, number, self._half.target)
        server.settle()

    def count(self, server: VirtualServer, bucket: int, blocks: Sequence[Block]) -> None:
        """A bucket of this worker's push to the open step counts at a server."""
        step = self._half.stamp(server.number).step
        for block in blocks:
            self._contribute(server, bucket, step, block)

    def _contribute(self, server: VirtualServer, bucket: int, step: int, block: Block) -> None:
        if self._gradients is None:
            decision = server.contribute(bucket, step, block, NOTHING)
            if decision.outcome is not Outcome.SPLIT:
                return
        # Real gradients go one by one: the servers add them up in the same order.
        for replica in range(block.first, block.end):
            gradient, hyper = NOTHING, None
            if self._gradients is not None:
                gradient = self._gradients.contribution((server.number, bucket), replica)
                hyper = self._gradients.hyper(replica)
            server.contribute(bucket, step, Block(replica, 1), gradient, hyper=hyper)

    def _push(self, server: VirtualServer) -> None:
        stamp = self._half.stamp(server.number)
        push = NumberedPush(
            task=self.task, incarnation=self.incarnation, seq=stamp.seq, base_version=stamp.base, clock=stamp.clock
        )
        computed, replica, buckets = self._gradients, self._owed[0], range(len(server.buckets))
        if computed is None:
            server.push(push, dict.fromkeys(buckets, NOTHING))
        else:
            gradients = {bucket: computed.contribution((server.number, bucket), replica) for bucket in buckets}
            server.push(push, gradients, hyper=computed.hyper(replica))

    def _pull(self, server: VirtualServer, bucket: int, step: int | None) -> None:
        server.pull(bucket, step, self.task, (self._reply, self._life))

    def _reply(self, life: int, answer: PulledBucket | None) -> None:
        if life != self._life:
            return
        if answer is None:
            self.begin()
            return
        # A worker that begins has none of the model.
        sizes = answer.sizes
        nbytes = sizes[self._half.step % len(sizes)] if self._pushed else sum(sizes)
        self._job.tally.pull_bytes += nbytes
        self._down[answer.server].send(nbytes, self.take_back, life, answer)

    # Parameters arrive

    def _expect(self) -> None:
        self._missing = self._buckets
        self._arrived = {}

    def _versions(self) -> dict[int, int]:
        base: dict[int, int] = {}
        for found in self._arrived.values():
            base[found.server] = min(base.get(found.server, found.version), found.version)
        return base

    def take_back(self, life: int, answer: PulledBucket) -> None:
        """A bucket of parameters has arrived."""
        if life != self._life:
            return
        self._arrived[answer.server, answer.bucket] = answer
        self._arrived_s[answer.bucket] = self._job.clock.now_s
        self._missing -= 1
        if self._missing:
            return
        base = {answer.server: answer.version} if self._buckets == 1 else self._versions()
        if self._gradients is not None:
            values = {place: found.values for place, found in self._arrived.items() if found.values is not None}
            self._gradients.pulled(values)
        if self._pushed:
            self._half.closed(self._half.step + 1, list(base), base, dropped=False)
            self._owed = self.owned
        else:
            self._half.arrived(base)
        goes_on, self._pushed = self._pushed, False
        self._compute(goes_on=goes_on)
