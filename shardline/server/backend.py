"""What lies between the server half of push and pull and the service that hosts the parameters.

DataPlane serves the shards of any Backend over every lane. Two kinds of threads meet here: the
server's event loop answers calls, and a thread pool does the tensor work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import torch

from shardline.codecs.coding import JobCoding
from shardline.consistency.base import Consistency, Gives
from shardline.consistency.server import NumberedPush, Offer, Terms
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block
from shardline.core.spec import TensorKind
from shardline.errors import ProtocolError
from shardline.server.buffers import Buffers
from shardline.server.pace import Pace
from shardline.server.signals import Signal
from shardline.server.staging import Staging
from shardline.storage.publication import Publication
from shardline.storage.shard import Storage

T = TypeVar("T")


class Sums(Protocol):
    """What a shard tells workers that run the optimizer."""

    def wants_state(self, buckets: Collection[int] = ()) -> bool:
        """Whether a cut of the open step lacks their state. buckets: of those that ask; () = all."""

    @property
    def hyper(self) -> Mapping[int, Mapping[str, float]]:
        """Hyper-parameters of the last closed step that differ from the job's, by parameter group."""


class HostedShard:
    """A shard as push and pull see it: its storage, and the job's mode over it. Any thread may use it."""

    def __init__(
        self,
        storage: Storage,
        consistency: Consistency,
        terms: Terms,
        *,
        publication: Publication,
        summing: Sums | None = None,
    ) -> None:
        """summing: set if workers run the optimizer, on the mean gradients that this shard publishes."""
        self.storage, self.publication, self.summing = storage, publication, summing
        self.number, self.buckets, self.tally = storage.number, storage.buckets, storage.tally
        self.consistency = consistency
        """The job's mode; it says how pushes are taken in and what is published."""
        self.mode = consistency.server_half(storage, terms)
        """What counts, when it is applied, what is served."""
        self.lends = Gives.LASTING_VALUES in consistency.gives
        """Published memory may be read in place: no update overwrites it before its readers have contributed to one."""
        self.tensors, self.replicas = len(terms.plan.tensors), terms.contributors
        """Number of tensors in the whole plan; number of replicas that make one update."""
        self.on_host = all(bucket.device.type == "cpu" for bucket in self.buckets)
        """Whether the values are in host memory."""

    @property
    def counts_inline(self) -> bool:
        """Counting a small bucket takes microseconds, including the update: there is no standby to wait for."""
        return self.on_host

    @property
    def position(self) -> tuple[int, int]:
        """step_min and version."""
        step, version = self.buckets[0].step, self.buckets[0].version
        for bucket in self.buckets:
            step = bucket.step if bucket.step < step else step
            version = bucket.version if bucket.version < version else version
        return step, version

    @property
    def step_min(self) -> int:
        """The open step: the lowest over all buckets."""
        return min([bucket.step for bucket in self.buckets])

    @property
    def step_max(self) -> int:
        """The highest open step over all buckets."""
        return max([bucket.step for bucket in self.buckets])

    @property
    def version(self) -> int:
        """Number of updates that every bucket has seen."""
        return self.storage.version

    @property
    def stop_step(self) -> int | None:
        """Last step of the job, if known."""
        return self.storage.stop_step

    def initialize(self, bucket: int, values: torch.Tensor | None) -> Decision:
        """Set one bucket's initial values; a repetition changes nothing. None: it is one of a table, which has none.

        Raises ProtocolError.
        """
        held = self.buckets[bucket]
        if values is None and held.spec.kind is not TensorKind.TABLE:
            raise ProtocolError(f"bucket {bucket}: initial values can't be empty")
        with held.lock:
            fresh = held.initialize(held.values if values is None else values)
        self.storage.observers.on_publish(bucket)
        return Decision(Outcome.COUNTED if fresh else Outcome.DUPLICATE)

    def contribute(self, bucket: int, step: int, block: Block, gradient: Gradient, **more: Any) -> Decision:
        """Offer one bucket of a step to the mode; more: see Offer."""
        return self.mode.admit(Offer(gradients={bucket: gradient}, step=step, block=block, **more))[0]

    def push(self, push: NumberedPush, gradients: Mapping[int, Gradient], **more: Any) -> tuple[Decision, int]:
        """Offer a whole numbered push to the mode; more: see Offer."""
        return self.mode.admit(Offer(gradients=gradients, push=push, **more))

    async def answerable(self) -> None:
        """Wait until the state that an answer reports can't be lost with this process. On the loop."""


class Backend(Protocol):
    """Hosts the shards. Used on the server's loop, unless a method says otherwise."""

    staging: Staging
    """Room for incoming contributions."""
    staging_wait_s: float
    """Seconds that one stream may wait for room in total."""
    pace: Pace
    """Of synchronous pushes whose bytes move."""
    buffers: Buffers
    """Memory for incoming buckets."""
    pool_threads: int
    generation: int
    """See the glossary: data received under an earlier generation does not count any more."""

    @property
    def timeline(self) -> int:
        """The current timeline."""

    @property
    def coding(self) -> JobCoding:
        """Coding of the job's numbers. Raises ProtocolError if there is no job."""

    @property
    def shards(self) -> Mapping[int, HostedShard]:
        """By number."""

    def shard(self, number: int) -> HostedShard:
        """The shard with this number. Raises ProtocolError if it isn't here."""

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        """Whether a message of this sender is processed: SERVED, or why not. init: it may come before training."""

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        """Why this incarnation does not count any more; None if it does. From any thread."""

    def signal(self, shard: int, bucket: int) -> Signal | None:
        """Signal of changes to a bucket; None if the bucket is gone."""

    async def work(self, function: Callable[..., T], *args: object) -> T:
        """Run tensor work in the pool; it must never wait for another task."""

    def work_whole(self, function: Callable[[], T], after: Callable[[], None]) -> asyncio.Future[T]:
        """work() that continues if its caller is cancelled. Then calls after(), even if the work never began."""

    def filled(self) -> None:
        """Note that a push of initial values was counted. In the pool."""

    def count(self, *, push_raw: int = 0, push_wire: int = 0, pull_raw: int = 0, pull_wire: int = 0) -> None:
        """Add bytes to the traffic metrics; raw = before the codec. From any thread."""

    def pulled(self, task: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """Record that a pull was answered in full."""
