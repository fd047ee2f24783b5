"""The state of an incoming push while its frames arrive, and its result."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardline.codecs.coding import BucketCoding, Coding
from shardline.consistency.intake import INITIAL, Intake
from shardline.core.fixed import fixed
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.reduce import Block
from shardline.lanes.attachments import Attachment
from shardline.rpc.v1 import data_pb2
from shardline.server.backend import HostedShard
from shardline.server.pace import Race
from shardline.server.slots import Slot, release_all, slot_bytes
from shardline.server.staging import Ask, AsyncPush


@dataclass(slots=True)
class IncomingPush:
    header: data_pb2.PushHeader
    shard: HostedShard
    hyper: Mapping[int, Mapping[str, float]]
    generation: int
    rejected: Decision | None = None
    coding: Coding | None = None
    """Coding of its buckets; None if it is rejected."""
    usual: Coding | None = None
    """Coding of gradients in this job. An aggregator sends sums of what it has decoded without it."""
    attachment: Attachment | None = None
    referred: deque[Slot] = field(default_factory=deque)
    """Referred buckets whose bytes are not expected yet."""
    more: asyncio.Event | None = None
    """Set when a reference or the commit arrives, for who takes referred buckets meanwhile."""
    committed: bool = False
    draining: asyncio.Task[None] | None = None
    slots: list[Slot] = field(default_factory=list)
    """Every slot that has asked for room in staging."""
    room: AsyncPush | None = None
    """Set for an asynchronous push, which is kept whole until its commit."""
    applying: bool = False
    """Set while the pool applies an asynchronous push, which then gives its room back by itself."""

    @property
    def race(self) -> Race | None:
        """The pushes that it keeps pace with: those of its step, if its bytes move and every replica is needed."""
        if self.attachment is None or self.attachment.borrowed or not self.summed or self.header.partial:
            return None
        return self.shard.number, self.header.step

    def comparable(self, bucket: int, coding: BucketCoding) -> bool:
        """Return whether the same bytes may come again, from another worker that was asked to compute them."""
        if self.usual is None or not self.gradient or self.shard.replicas <= 1:
            return False
        return coding.name == self.usual.bucket(self.shard.number, bucket).name

    def release(self) -> None:
        """Give back all room in staging. May be called twice."""
        release_all(self.slots)

    done: set[int] = field(default_factory=set)
    decisions: dict[int, Decision] = field(default_factory=dict)
    staged: dict[int, Gradient] = field(default_factory=dict)
    running: list[asyncio.Future[None]] = field(default_factory=list)
    raw_bytes: int = 0
    wire_bytes: int = 0
    started_s: float = field(default_factory=time.monotonic)
    block: Block = field(init=False)
    """Its replicas."""
    gradient: bool = True
    """It carries gradients, not initial values."""
    intake: Intake = INITIAL
    number: int | None = None
    """Under which it is kept until its commit, and counted as a whole; None: each bucket counts once it is complete."""
    summed: bool = False
    """Its buckets are added to those of others."""

    def __post_init__(self) -> None:
        self.gradient, block = gradient_kind(self.header), self.header.block
        self.block = Block(block.first, block.count)
        if self.rejected is None:
            self.intake, replicas = self.shard.consistency.intake if self.gradient else INITIAL, self.shard.replicas
            self.number = self.intake.number(self.header.seq)
            self.summed = replicas > 1 and self.intake.sums(0, replicas) > 0


@fixed()
class PushResult:
    """The result of a finished push, for the ack and the metrics."""

    ack: data_pb2.PushAck
    task: str
    """The sender; empty if it was not admitted, so that a stranger's names don't fill the metrics."""
    shard: int
    codec: str
    lane: str
    raw_bytes: int
    wire_bytes: int
    seconds: float


def gradient_kind(header: data_pb2.PushHeader) -> bool:
    """Whether a push carries gradients, not initial values."""
    return header.kind != data_pb2.PUSH_KIND_INIT


def held_bytes(push: IncomingPush, coding: BucketCoding) -> int:
    """Bytes that a bucket of a push needs in staging."""
    return slot_bytes(
        coding,
        borrowed=push.attachment is not None and push.attachment.borrowed,
        summed=push.summed,
    )


def room_wanted(push: IncomingPush, number: int, nbytes: int) -> Ask:
    """The request for so much room for a bucket of a push."""
    return Ask(push.shard.number, push.intake.place(number), push.block, nbytes, push.header.step, push.room)


SEVERITY = (
    Outcome.REFUSED,
    Outcome.FENCED,
    Outcome.WRONG_TIMELINE,
    Outcome.NOT_CONFIGURED,
    Outcome.STOPPED,
    Outcome.OUT_OF_SEQUENCE,
    Outcome.SPLIT,
    Outcome.LATE_DROPPED,
    Outcome.SKIPPED,
    Outcome.COUNTED,
    Outcome.STAGED,
    Outcome.APPLIED,
    Outcome.DUPLICATE,
)
"""Worst first: a push's outcome is that of its worst bucket."""


def worst_of(decisions: Sequence[Decision]) -> Decision:
    return decisions[0] if len(decisions) == 1 else min(decisions, key=lambda found: SEVERITY.index(found.outcome))
