"""One bucket of a push from its announcement to its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from shardline.codecs.base import Turn
from shardline.codecs.coding import BucketCoding
from shardline.core.gradients import Gradient
from shardline.core.plan import BucketSpec
from shardline.core.tensor_bytes import Buffer, borrowed_tensor, copy_bytes, digest, fingerprint
from shardline.errors import ProtocolError
from shardline.host.device_memory import settle
from shardline.lanes.attachments import Ticket
from shardline.server.backend import HostedShard
from shardline.server.staging import StagingLease
from shardline.waist import Memory, octets

NO_BYTES = memoryview(b"")
QUICK_BYTES = 64 << 10
"""Total size of buckets that are counted on the loop: about ten microseconds of arithmetic."""


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
