"""Interfaces between the server half of push and pull and the service that hosts the parameters.

DataPlane serves any implementation of Backend and HostedShard over every lane. Two kinds of threads meet here: the
server's event loop answers calls, and a thread pool does the tensor work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from shardline.codecs.coding import JobCoding
from shardline.consistency.base import Consistency
from shardline.consistency.server import Guard, NumberedPush, StepWanted
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block
from shardline.server.buffers import Buffers
from shardline.server.pace import Pace
from shardline.server.signals import Signal
from shardline.server.staging import Staging
from shardline.storage.bucket import Bucket
from shardline.storage.publication import Publication
from shardline.storage.shard import Hyper

T = TypeVar("T")


class Sums(Protocol):
    """What a shard tells workers that run the optimizer."""

    def wants_state(self, buckets: Collection[int] = ()) -> bool:
        """Whether a cut of the open step lacks their state. buckets: of those that ask; () = all."""
        ...

    @property
    def hyper(self) -> Mapping[int, Mapping[str, float]]:
        """Hyper-parameters of the last closed step that differ from the job's, by parameter group."""
        ...


class HostedShard(Protocol):
    """One shard. Any thread may call it, unless a method says otherwise."""

    @property
    def number(self) -> int:
        """Number in the plan."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the plan's order."""
        ...

    @property
    def consistency(self) -> Consistency:
        """The job's mode; its traits say how pushes come and what may be pulled."""
        ...

    @property
    def publication(self) -> Publication:
        """Memory of the published values."""
        ...

    @property
    def tensors(self) -> int:
        """Number of tensors in the whole plan; a push can't name more, but for the loss."""
        ...

    @property
    def replicas(self) -> int:
        """Number of replicas that make one update."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether the values are in host memory."""
        ...

    @property
    def counts_inline(self) -> bool:
        """Counting a small bucket takes microseconds, including the update: no vote and no standby to wait for."""
        ...

    @property
    def position(self) -> tuple[int, int]:
        """step_min and version."""
        ...

    @property
    def step_min(self) -> int:
        """The open step: the lowest over all buckets."""
        ...

    @property
    def step_max(self) -> int:
        """The highest open step over all buckets."""
        ...

    @property
    def version(self) -> int:
        """Number of updates that every bucket has seen."""
        ...

    @property
    def stop_step(self) -> int | None:
        """Last step of the job, if known."""
        ...

    @property
    def summing(self) -> Sums | None:
        """Set if workers run the optimizer, on the mean gradients that this shard publishes."""
        ...

    def initialize(self, bucket: int, values: torch.Tensor) -> Decision:
        """Set one bucket's initial values; a repetition changes nothing."""
        ...

    def contribute(
        self,
        bucket: int,
        step: int,
        block: Block,
        gradient: Gradient,
        *,
        hyper: Hyper | None = None,
        nonfinite: Collection[str] = (),
        guard: Guard = lambda: None,
    ) -> Decision:
        """Count one bucket of a contribution to a step; see consistency.server.ServerHalf.contribute()."""
        ...

    def push(
        self,
        push: NumberedPush,
        gradients: Mapping[int, Gradient],
        *,
        hyper: Hyper | None = None,
        guard: Guard = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[Decision, int]:
        """Count a whole push; see consistency.server.ServerHalf.push()."""
        ...

    def serve(self, bucket: int, want: StepWanted) -> Outcome:
        """Whether a pull of a bucket may be answered now: SERVED, WAITING or OVERTAKEN. Needs no lock."""
        ...

    def waiting_for(self) -> list[int]:
        """Replicas missing in the open step."""
        ...

    def slowest(self) -> list[str]:
        """Workers whose pushes the pulls of others wait for."""
        ...

    def asked(self, task: str, incarnation: int, *, begins: bool) -> None:
        """Note that a worker begins to compute, or rests; see consistency.server.ServerHalf.asked()."""
        ...

    def progress(self, replica: int) -> int:
        """The step that a replica has to work on."""
        ...

    def last_push(self, task: str, incarnation: int = 0) -> int:
        """Sequence number of the last counted push of an incarnation (0 = the latest); 0 if there is none."""
        ...

    async def answerable(self) -> None:
        """Wait until the state that an answer reports can't be lost with this process. On the loop."""
        ...


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
        ...

    @property
    def coding(self) -> JobCoding:
        """Coding of the job's numbers. Raises ProtocolError if there is no job."""
        ...

    @property
    def shards(self) -> Mapping[int, HostedShard]:
        """By number."""
        ...

    def shard(self, number: int) -> HostedShard:
        """The shard with this number. Raises ProtocolError if it isn't here."""
        ...

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        """Whether a message of this sender is processed: SERVED, or why not. init: it may come before training."""
        ...

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        """Why this incarnation does not count any more; None if it does. From any thread."""
        ...

    def signal(self, shard: int, bucket: int) -> Signal | None:
        """Signal of changes to a bucket; None if the bucket is gone."""
        ...

    async def work(self, function: Callable[..., T], *args: object) -> T:
        """Run tensor work in the pool; it must never wait for another task."""
        ...

    def work_whole(self, function: Callable[[], T], after: Callable[[], None]) -> asyncio.Future[T]:
        """work() that continues if its caller is cancelled. Then calls after(), even if the work never began."""
        ...

    def filled(self) -> None:
        """Note that a push of initial values was counted. In the pool."""
        ...

    def count(self, *, push_raw: int = 0, push_wire: int = 0, pull_raw: int = 0, pull_wire: int = 0) -> None:
        """Add bytes to the traffic metrics; raw = before the codec. From any thread."""
        ...

    def pulled(self, task: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """Record that a pull was answered in full."""
        ...


def numbers(values: Sequence[int], limit: int = 8) -> str:
    """The numbers as text, shortened for a message."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown + (f" and {len(values) - limit} more" if len(values) > limit else "")
