"""The state of an incoming push while its frames arrive, and its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding, Coding
from shardline.consistency.intake import INITIAL, Intake
from shardline.core.fixed import fixed
from shardline.core.gradients import Gradient
from shardline.core.outcome import Decision, Outcome
from shardline.core.plan import BucketSpec
from shardline.core.reduce import Block
from shardline.core.spec import TensorKind
from shardline.core.tensor_bytes import Buffer, borrowed_tensor, copy_bytes, digest, fingerprint
from shardline.errors import ProtocolError
from shardline.host.device_memory import settle
from shardline.lanes.attachments import Attachment, Ticket
from shardline.rpc.v1 import data_pb2
from shardline.server.backend import HostedShard
from shardline.server.pace import Race
from shardline.server.staging import Ask, AsyncPush, StagingLease
from shardline.waist import Memory, octets

NO_BYTES = memoryview(b"")
QUICK_BYTES = 64 << 10
"""Total size of buckets that are counted on the loop: about ten microseconds of arithmetic."""
TURN_BYTES = 1 << 20
"""Bytes that are worth a turn of another thread of the pool."""


@dataclass(slots=True)
class Slot:
    number: int
    spec: BucketSpec
    coding: BucketCoding
    present: tuple[bool, ...]
    memory: Memory
    digest: int = 0
    nonfinite: Sequence[str] = ()
    bound: float = math.inf
    """As in Gradient."""
    fingerprint: int = 0
    """As computed by the sender; 0 = not sent."""
    borrowed: bool = False
    offset: int = 0
    """Offset of a referred bucket in its segment."""
    moved: bool = True
    """Whether the bytes were transferred; bytes that stayed in place can't be damaged."""
    matches: bool | None = None
    """Whether the bytes have the digest; None = nobody has looked yet."""
    size: int = 0
    """Bytes of the announced payload."""
    filled: int = 0
    chunks: int = 0
    parts: list[Buffer] = field(default_factory=list)
    """Payloads of its chunks, in order."""
    ticket: Ticket | None = None
    lease: StagingLease | None = None

    def add(self, offset: int, payload: Buffer) -> None:
        """Add the next chunk. Raises ProtocolError and leaves the slot unchanged if it does not fit."""
        end = offset + len(payload)
        if offset != self.filled or end > self.size:
            raise ProtocolError(
                f"bucket {self.number}: chunk of {len(payload)} bytes at {offset}; expected one at {self.filled} "
                f"within {self.size} bytes. Chunks must not overlap, repeat or leave gaps"
            )
        if self.size and not len(payload):
            raise ProtocolError(f"bucket {self.number}: an empty chunk in a bucket that is not empty")
        self.parts.append(payload)
        self.filled = end
        self.chunks += 1

    def release(self) -> None:
        """Give back the room in staging and the memory: a push keeps its slots until it ends.

        Counted gradients have a reference of their own. May be called twice.
        """
        self.memory, self.ticket, self.parts = NO_BYTES, None, []
        if self.lease is not None:
            self.lease.release()


def slot_bytes(coding: BucketCoding, *, borrowed: bool, summed: bool) -> int:
    """Maximum memory for an incoming bucket: its payload, the decoded values, and its sum with another.

    borrowed: the payload is in the worker's memory. summed: there may be another contribution.
    """
    spec = coding.layout.bucket
    if spec.kind is TensorKind.TABLE:
        # Nobody knows how many rows come; rows.MOST_BYTES bounds each push.
        return spec.nbytes
    decoded = 0 if coding.codec.is_view else spec.nbytes
    # A payload that is read twice is copied: the worker may write to its memory at any time.
    held = decoded if borrowed and coding.fixed_size else decoded + coding.max_bytes
    # Payloads in a message or the worker's memory are summed elsewhere, decoded values in place.
    return held + spec.nbytes if summed and not (borrowed and decoded) else held


def opened(slot: Slot, take: Callable[[int], memoryview], *, repeated: bool) -> Gradient:
    """The gradient of a complete slot. take: memory for payloads in several chunks. Runs in the pool.

    repeated: another worker may be asked to compute it again, so that its fingerprint is needed.

    Raises ProtocolError if the digest differs, or if the push has ended and released the slot.
    """
    # Keep a reference here: the end of the push may call release() at any moment.
    ticket, held = slot.ticket, _joined(slot, take)
    if len(held) != slot.size:
        raise ProtocolError(f"bucket {slot.number}: its push ended before it was counted; nothing was changed")
    turn = Turn(present=slot.present)
    if isinstance(held, torch.Tensor) and ticket is not None and slot.coding.codec.is_view:
        # On the shard's device, in memory of the worker, which is gone when the worker is: none of it is kept.
        values = ticket.tensor(slot.spec.dtype).clone()
        settle(values.device)
        return Gradient(values, slot.present, slot.fingerprint, slot.bound)
    memory = memoryview(octets(held))
    if slot.digest and slot.moved and not (slot.digest == digest(memory) if slot.matches is None else slot.matches):
        raise ProtocolError(f"bucket {slot.number}: the digest of the received bytes differs; nothing was changed")
    # For bytes in place this would be a pass over cold memory, while the sender has them in its cache.
    mark = slot.fingerprint or (fingerprint(memory) if repeated and slot.moved else 0)
    if not slot.coding.codec.is_view:
        # The decoded values may be larger than the payload that was checked.
        stable = memory if slot.moved or slot.coding.fixed_size else bytes(memory)
        return Gradient(slot.coding.coder.decode(stable, turn), slot.present, mark)
    if slot.borrowed:
        values = borrowed_tensor(memory, slot.spec.dtype) if ticket is None else ticket.tensor(slot.spec.dtype)
    else:
        values = slot.coding.coder.decode(memory, turn)
    return Gradient(values, slot.present, mark, slot.bound, slot.borrowed)


def _joined(slot: Slot, take: Callable[[int], memoryview]) -> Memory:
    """The bytes of a bucket that came in chunks. A single chunk is used in place as long as the contribution lives."""
    parts, slot.parts = slot.parts, []
    if not parts:
        return slot.memory
    if len(parts) == 1:
        slot.borrowed = True
        return memoryview(parts[0])
    memory, end = take(slot.size), 0
    for part in parts:
        copy_bytes(memory[end : end + len(part)], part)
        end += len(part)
    return memory


def applies_inline(shard: HostedShard, numbers: Iterable[int]) -> bool:
    """Whether to count these buckets on the loop, because handing them to the pool would take longer.

    Excludes everything that may take long: many bytes, a locked bucket, or a shard that has to wait.
    """
    nbytes = 0
    for bucket in shard.consistency.intake.touched(shard.buckets, numbers):
        nbytes += bucket.spec.nbytes
        if nbytes > QUICK_BYTES or bucket.lock.locked():
            return False
    return shard.counts_inline


def stands_inline(shard: HostedShard, numbers: Iterable[int]) -> bool:
    """Whether to count a push without gradients of these buckets on the loop, however large they are.

    So it is where nobody else's gradient belongs to the step, and both published steps are the same: there is nothing
    to compute or to copy.
    """
    for bucket in shard.consistency.intake.touched(shard.buckets, numbers):
        if bucket.lock.locked() or bucket.changed_step >= bucket.step:
            return False
    return shard.replicas == 1 and shard.counts_inline


def release_all(slots: Sequence[Slot]) -> None:
    for slot in slots:
        slot.release()


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
