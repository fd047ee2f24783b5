"""What the server half of push and pull needs of whoever holds the parameters.

A service that implements Backend and HostedShard is served by DataPlane over every lane. Two clocks meet here: the
server's event loop, on which calls are answered, and a pool of threads, in which tensors are worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from shardline.codecs.coding import JobCoding
from shardline.consistency.base import Consistency
from shardline.consistency.server import Guard, Hyper, Push, StepWanted
from shardline.core.gradients import Gradient
from shardline.core.identity import Identity
from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block
from shardline.server.buffers import Buffers
from shardline.server.signals import Signal
from shardline.server.staging import Staging
from shardline.storage.base import ParameterBlock
from shardline.storage.publication import Publication

T = TypeVar("T")


class HostedShard(Protocol):
    """One shard. Any thread may call it, unless a method says otherwise."""

    @property
    def number(self) -> int:
        """Of the plan."""
        ...

    @property
    def buckets(self) -> Sequence[ParameterBlock]:
        """In the plan's order."""
        ...

    @property
    def consistency(self) -> Consistency:
        """The job's mode: how pushes come and what may be pulled, by its traits."""
        ...

    @property
    def publication(self) -> Publication:
        """The memory of the published values."""
        ...

    @property
    def tensors(self) -> int:
        """Tensors of the whole plan; a push can't name more of them."""
        ...

    @property
    def replicas(self) -> int:
        """That make one update."""
        ...

    @property
    def on_host(self) -> bool:
        """The values lie in the machine's own memory."""
        ...

    @property
    def counts_inline(self) -> bool:
        """Counting a small bucket takes microseconds, update included: no vote and no standby is waited for."""
        ...

    @property
    def step_min(self) -> int:
        """The open step: the lowest over the buckets."""
        ...

    @property
    def step_max(self) -> int:
        """The highest over the buckets."""
        ...

    @property
    def version(self) -> int:
        """Updates that every bucket has seen."""
        ...

    @property
    def stop_step(self) -> int | None:
        """Nothing goes past it, where it is known."""
        ...

    def initialize(self, bucket: int, values: torch.Tensor) -> Decision:
        """Set one bucket's first values; a second time changes nothing."""
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
        push: Push,
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
        """Replicas that the open step lacks."""
        ...

    def progress(self, replica: int) -> int:
        """The step that a replica has to work on."""
        ...

    def last_push(self, task: str, incarnation: int = 0) -> int:
        """Number of the last push that counted of a worker's life (0 = its latest); 0 if there is none."""
        ...

    async def answerable(self) -> None:
        """Return when what an answer tells of can't be lost with this process any more. On the loop."""
        ...


class Backend(Protocol):
    """Who holds the shards. Used on the server's loop, unless a method says otherwise."""

    staging: Staging
    """Room for what comes in."""
    staging_wait_s: float
    """Seconds that one stream may wait for it, in all."""
    buffers: Buffers
    """Memory for what comes in."""
    pool_threads: int
    generation: int
    """Counts histories: what came in under an earlier one counts no more."""

    @property
    def timeline(self) -> int:
        """The history in force."""
        ...

    @property
    def coding(self) -> JobCoding:
        """How the job's numbers are written. Raises ProtocolError if there is no job."""
        ...

    @property
    def shards(self) -> Mapping[int, HostedShard]:
        """By number."""
        ...

    def shard(self, number: int) -> HostedShard:
        """The shard of this number. Raises ProtocolError if it isn't here."""
        ...

    def admit(self, *, job: str, timeline: int, plan_id: str, who: Identity, init: bool) -> Decision:
        """Whether a message of this sender is looked at: SERVED, or why not. init: it may come before training."""
        ...

    def fenced(self, task: str, incarnation: int) -> Decision | None:
        """Why this life of a task counts no more; None if it does. From any thread."""
        ...

    def signal(self, shard: int, bucket: int) -> Signal | None:
        """What is notified when a bucket has changed; None if it is gone."""
        ...

    async def work(self, function: Callable[..., T], *args: object) -> T:
        """Run tensor work in the pool; it must never wait for another task."""
        ...

    async def work_whole(self, function: Callable[[], T], after: Callable[[], None]) -> T:
        """work() that goes on where its caller is cancelled; then after(), also where it never began."""
        ...

    def filled(self) -> None:
        """A push of first values has counted. In the pool."""
        ...

    def count(self, *, push_raw: int = 0, push_wire: int = 0, pull_raw: int = 0, pull_wire: int = 0) -> None:
        """Add bytes to the traffic figures; raw = before the codec. From any thread."""
        ...

    def pulled(self, task: str, codec: str, lane: str, raw_bytes: int, wire_bytes: int, seconds: float) -> None:
        """A pull was answered in full."""
        ...


def numbers(values: Sequence[int], limit: int = 8) -> str:
    """A short list for a sentence."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown + (f" and {len(values) - limit} more" if len(values) > limit else "")
