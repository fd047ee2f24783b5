"""A second service on the library's server half: an aggregator, which serves the sum of its members' pushes.

theta_t is the sum of all members' contributions to step t - 1, and zeros at step 0. It trains nothing; it could stand
between the workers of a rack and a parameter server.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardline.codecs import coding_of
from shardline.config import RoleConfig
from shardline.consistency.eager import Eager
from shardline.consistency.replica_steps import admit_push, serve_pull
from shardline.consistency.server import Guard, NumberedPush, StepWanted
from shardline.core.contributions import Contributions
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import BucketSpec, Plan, ShardSpec
from shardline.core.reduce import Block
from shardline.core.tensor_bytes import tensor_bytes
from shardline.errors import ProtocolError
from shardline.lanes import LANES
from shardline.lanes.attachments import Attachments
from shardline.rpc.server import RpcServer
from shardline.rpc.v1.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from shardline.server.buffers import Buffers
from shardline.server.data_plane import DataPlane
from shardline.server.pace import Pace
from shardline.server.signals import Signal
from shardline.server.staging import Staging
from shardline.storage.bucket import WriteCounts
from shardline.storage.publication import PlainPublication, Publication, areas

T = TypeVar("T")


class SumBlock:
    """One bucket: the sums of the last two steps, and the contributions to the open step so far."""

    def __init__(self, number: int, spec: BucketSpec, names: tuple[str, ...], members: int, publication: Publication):
        self.lock, self.number, self.spec, self.names = threading.Lock(), number, spec, names
        self.step = self.version = self.changed_step = 0
        self.writes = WriteCounts()
        self.overwritten, self.initialized = -1, True
        self.gathered = Contributions(spec, members)
        self._values = areas(publication, number, spec, keeps_previous=True)

    def values_at(self, step: int) -> torch.Tensor:
        return self._values[step & 1]

    def bytes_at(self, step: int) -> memoryview:
        return tensor_bytes(self._values[step & 1])

    def answer(self, step: int, task: str) -> torch.Tensor:
        return self.values_at(step)

    def close(self) -> None:
        """All members have contributed: publish their sum in place of the older one."""
        total, self.overwritten = self.gathered.take(), self.step - 1
        self.writes.begin(self.step + 1)
        following = self.values_at(self.step + 1)
        following.zero_() if total.values is None else following.copy_(total.values)
        self.gathered.clear()
        self.version, self.changed_step = self.version + 1, self.step + 1
        self.step += 1


class SumShard:
    """A shardline.server.backend.HostedShard."""

    on_host, counts_inline, stop_step = True, True, None
    summing = None
    consistency = Eager()

    def __init__(
        self, number: int, plan: Plan, members: int, publication: Publication, notify: Callable[[int, int], None]
    ) -> None:
        self.number, self.tensors, self.replicas = number, len(plan.tensors), members
        self.publication, self._notify = publication, notify
        self.buckets = [
            SumBlock(n, spec, tuple(plan.tensors[s.tensor].name for s in spec.slices), members, publication)
            for n, spec in enumerate(plan.shards[number].buckets)
        ]

    @property
    def step_min(self) -> int:
        return min(block.step for block in self.buckets)

    @property
    def step_max(self) -> int:
        return max(block.step for block in self.buckets)

    version = step_min

    @property
    def position(self) -> tuple[int, int]:
        return self.step_min, self.version

    def initialize(self, bucket: int, values: torch.Tensor) -> Decision:
        raise ProtocolError("an aggregator has no first values")

    def contribute(
        self, bucket: int, step: int, block: Block, gradient: Gradient, *, guard: Guard = lambda: None, **unused: Any
    ) -> Decision:
        to, members = self.buckets[bucket], self.replicas
        with to.lock:
            decision = guard() or admit_push(step, to.gathered.counted, block, bucket_step=to.step, replicas=members)
            if decision.outcome is Outcome.COUNTED:
                values, mark, borrowed = gradient.values, gradient.fingerprint, gradient.borrowed
                to.gathered.add(block, values, gradient.present, mark, borrowed=borrowed)
                if to.gathered.complete:
                    to.close()
        self._notify(self.number, bucket)
        return decision

    def push(self, push: NumberedPush, gradients: Mapping[int, Gradient], **more: Any) -> tuple[Decision, int]:
        raise ProtocolError("an aggregator takes the buckets of a step")

    def serve(self, bucket: int, want: StepWanted) -> Outcome:
        step = self.buckets[bucket].step
        return serve_pull(step if want.step is None else want.step, bucket_step=step)

    def waiting_for(self) -> list[int]:
        return min(self.buckets, key=lambda block: block.step).gathered.missing()

    def slowest(self) -> list[str]:
        return []

    def asked(self, task: str, incarnation: int, *, begins: bool) -> None:
        """Nobody is held back."""

    def progress(self, replica: int) -> int:
        return min(block.step + (replica in block.gathered.counted) for block in self.buckets)

    def last_push(self, task: str, incarnation: int = 0) -> int:
        return 0

    async def answerable(self) -> None:
        """Returns at once: there is no standby."""


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
        for kind in LANES:
            offer = kind().offer(config, on_host=True, take=self.buffers.take, on_refused=print)
            if offer is not None:
                self._offers.append(offer)
                self.attachments.offer(offer)
        loop = self.server.loop
        self._signals = {(s, b): Signal(loop) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets))}
        self.shards = {
            number: SumShard(number, plan, replicas, self._publication(spec), self._changed)
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
