"""A second service on the library's server half: an aggregator, which serves the sum of its members' pushes.

theta_t is the sum of all members' contributions to step t - 1, and zeros at step 0. It trains nothing; it could stand
between the workers of a rack and a parameter server.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from shardline.codecs import coding_of
from shardline.config import RoleConfig
from shardline.consistency.eager import Eager, EagerSteps
from shardline.consistency.intake import BOTH_STEPS
from shardline.consistency.server import ServerHalf, Terms
from shardline.core.contributions import Contributions, Partial
from shardline.core.identity import Identity
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import Plan, ShardSpec
from shardline.core.push_context import PushContext
from shardline.errors import ProtocolError
from shardline.lanes import LANES
from shardline.lanes.attachments import Attachments
from shardline.lanes.kind import ServerSide
from shardline.rpc.server import RpcServer
from shardline.rpc.v1.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from shardline.server.backend import HostedShard
from shardline.server.buffers import Buffers
from shardline.server.data_plane import DataPlane
from shardline.server.pace import Pace
from shardline.server.signals import Signal
from shardline.server.staging import Staging
from shardline.storage.bucket import Bucket
from shardline.storage.publication import PlainPublication, Publication
from shardline.storage.shard import ByteCount, Observers, Storage

T = TypeVar("T")


class SumBucket(Bucket):
    """A bucket whose values are the sum of the last step's contributions."""

    def update(
        self, target: torch.Tensor, total: Partial, scale: float, source: torch.Tensor | None, context: PushContext
    ) -> bool:
        target.zero_() if total.values is None else target.copy_(total.values)
        return True


class Sums(EagerSteps):
    divisor = 1


class Adding(Eager):
    """Synchronous steps whose contributions are added up, not averaged."""

    def server_half(self, storage: Storage, terms: Terms) -> ServerHalf:
        return Sums(storage, terms)


class SumShard(HostedShard):
    def initialize(self, bucket: int, values: torch.Tensor) -> Decision:
        raise ProtocolError("an aggregator has no first values")


def sum_shard(
    number: int, plan: Plan, members: int, publication: Publication, notify: Callable[[int, int], None]
) -> SumShard:
    waiting, buckets = ByteCount(), []
    for index, spec in enumerate(plan.shards[number].buckets):
        gathered = Contributions(spec, members, on_held=waiting.add)
        pub = BOTH_STEPS.areas(publication, index, spec)
        bucket = SumBucket(number, index, spec, plan.tensors, lambda device: None, contributions=gathered, pub=pub)
        bucket.initialize(torch.zeros(spec.elements))
        buckets.append(bucket)
    storage = Storage(number, buckets, Observers(on_publish=lambda bucket: notify(number, bucket)), waiting)
    terms = Terms(plan=plan, contributors=members, nan_policy="stop")
    return SumShard(storage, Adding(), terms, publication=publication)


class Aggregator:
    """A shardline.server.backend.Backend with a server. members: admitted incarnation by task."""

    staging_wait_s, pool_threads, generation = 10.0, 2, 1

    def __init__(
        self, config: RoleConfig, job: str, timeline: int, plan: Plan, members: Mapping[str, int], *, replicas: int
    ) -> None:
        self.job, self.timeline, self.plan, self.members = job, timeline, plan, dict(members)
        self.coding = coding_of("raw", plan)
        self.staging, self.pace, self.buffers = Staging(), Pace(), Buffers(lambda: 64 << 20)
        self.bytes_in = self.bytes_out = 0
        self._pool = ThreadPoolExecutor(self.pool_threads)
        self.attachments, self._offers = Attachments(), []
        # The generated base answers all other calls: they are not implemented.
        plane = DataPlane(self, self.attachments)  # type: ignore[abstract]
        register = [functools.partial(add_ParameterServerServicer_to_server, plane)]
        self.server = RpcServer(config.cluster.address(config.task), register=register, name="sums")
        side = ServerSide(config, torch.device("cpu"), self.buffers.take, print)
        for kind in LANES:
            offer = kind().offer(side)
            if offer is not None:
                self._offers.append(offer)
                self.attachments.offer(offer)
        loop = self.server.loop
        self._signals = {(s, b): Signal(loop) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets))}
        self.shards = {
            number: sum_shard(number, plan, replicas, self._publication(spec), self._changed)
            for number, spec in enumerate(plan.shards)
        }
        self.address = self.server.start()

    def _publication(self, spec: ShardSpec) -> Publication:
        wanted = (offer.publish(spec, keeps_previous=True) for offer in self._offers)
        return next((made for made in wanted if made is not None), None) or PlainPublication(spec, torch.device("cpu"))

    def _changed(self, shard: int, bucket: int) -> None:
        self._signals[shard, bucket].notify()

    def shard(self, number: int) -> SumShard:
        return self.shards[number]

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        if timeline != self.timeline:
            return Decision(Outcome.WRONG_TIMELINE, f"timeline {timeline:#x}; the aggregator is at {self.timeline:#x}")
        if (job, plan_id) != (self.job, self.plan.plan_id):
            return Decision(Outcome.REFUSED, f"this aggregator is part of job {self.job!r}, not of {job!r}")
        return self.fenced(who.task, who.incarnation) or Decision(Outcome.SERVED)

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        if self.members.get(task) == incarnation:
            return None
        return Decision(Outcome.FENCED, f"{task} incarnation {incarnation:#x} is no member")

    def signal(self, shard: int, bucket: int) -> Signal | None:
        return self._signals.get((shard, bucket))

    async def work(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args))

    def work_whole(self, function: Callable[[], T], after: Callable[[], None]) -> asyncio.Future[T]:
        def whole() -> T:
            try:
                return function()
            finally:
                after()

        return asyncio.shield(self.work(whole))

    def filled(self) -> None: ...

    def count(self, *, push_raw: int = 0, push_wire: int = 0, pull_raw: int = 0, pull_wire: int = 0) -> None:
        self.bytes_in, self.bytes_out = self.bytes_in + push_raw, self.bytes_out + pull_raw

    def pulled(self, task: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None: ...

    def close(self) -> None:
        async def close_lanes() -> None:
            self.attachments.close()

        self.server.run(close_lanes(), timeout_s=10.0)
        self.server.close(grace_s=0.0)
        self._pool.shutdown()
