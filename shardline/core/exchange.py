"""What a task and a shard tell each other in one exchange: pushes, a pull, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.plan import BUCKET_BYTES
from shardline.core.reduce import Block
from shardline.core.tensor_bytes import Buffer

CHUNK_BYTES = BUCKET_BYTES
"""Of a bucket, in one message of a push or pull: mostly all of it, which then need not be put together."""


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Who speaks, and in which history."""

    job: str
    timeline: int
    plan_id: str
    who: Identity


@dataclass(frozen=True, kw_only=True)
class BucketPayload:
    """One bucket on its way out. data: encoded bytes, unchanged until acknowledged (retries resend them)."""

    bucket: int
    dtype: str
    elements: int
    present: bytes
    """Bitmap of the slices that have a gradient; empty = all."""
    data: Buffer
    raw_bytes: int
    digest: int
    """Of `data`; 0 = it was to stay where it lies. Where it travels after all, the lane makes it."""
    nonfinite: Sequence[str] = ()
    """Tensors of the bucket in which the worker found NaN or infinity (policy "skip")."""
    bound: float = 0.0
    """No element is larger in magnitude, as the worker has seen; 0 = nobody looked, or all are zero."""
    fingerprint: int = 0
    """Of `data`, see core.tensor_bytes.fingerprint; 0 = not known."""


class Payloads(Protocol):
    """The encoded buckets of one push, some of them perhaps still being computed.

    May be gone through several times, by several threads: a retry begins at the first bucket again.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads together, at most; for deadlines."""
        ...

    @property
    def empty(self) -> Sequence[int]:
        """Buckets to which the push adds nothing; known when batches() has ended."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether all of them are made, and lie where the shard reads them as long as the lane shares memory."""
        ...

    def batches(self) -> Iterator[Sequence[BucketPayload]]:
        """What is ready, in the order to send it; waits for more until all have come. Ends early by raising."""
        ...


@dataclass(frozen=True)
class Whole:
    """Payloads that are all there."""

    items: Sequence[BucketPayload] = ()
    empty: Sequence[int] = ()
    in_place: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads together."""
        return sum(len(item.data) for item in self.items)

    def batches(self) -> Iterator[Sequence[BucketPayload]]:
        """Everything at once."""
        if self.items:
            yield self.items


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One push to one shard."""

    payloads: Payloads
    step: int = 0
    block: Block = field(default_factory=lambda: Block(0, 1))
    seq: int = 0
    init: bool = False
    base_min: int = 0
    base_max: int = 0
    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    codec: str = ""
    """Of the payloads; "" = as they are."""
    nonfinite: Sequence[str] = ()
    num_samples: int = 0
    scale: float = 1.0
    skip: bool = False


@dataclass(frozen=True, kw_only=True)
class Want:
    """What to pull. step None = the latest."""

    step: int | None
    have_step: int | None = None
    buckets: Sequence[int] = ()
    """In the order wanted; empty = all."""
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Head of one pulled bucket."""

    bucket: int
    step: int
    version: int
    unchanged: bool
    codec: str
    payload_bytes: int
    area: int = 0
    """shm: 0 or 1 = what the shard publishes at even or odd steps, 2 = this worker's replies."""
    offset: int = 0
    """shm: bytes from the start of the area."""


ACCEPTED = (Outcome.COUNTED, Outcome.STAGED, Outcome.APPLIED, Outcome.DUPLICATE, Outcome.SKIPPED)
"""Outcomes of a push that counts, or did before."""


@dataclass(frozen=True, kw_only=True)
class Ack:
    """What became of a push."""

    outcome: Outcome
    reason: str = ""
    step: int = 0
    version: int = 0
    staleness: int = 0
    next_seq: int = 0
    timeline: int = 0
    mismatch: bool = False
    """DUPLICATE: the shard counted other bits than these before."""

    @property
    def accepted(self) -> bool:
        """The push counts, or did before."""
        return self.outcome in ACCEPTED


@dataclass(frozen=True, kw_only=True)
class End:
    """How a pull ended."""

    outcome: Outcome
    reason: str = ""
    step: int = 0
    version: int = 0
    timeline: int = 0
    waiting_for: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Result of one exchange; `end` is None if nothing was pulled.

    It ends early at the first push that is not accepted: its ack is the last one, and there is no end of the pull.
    """

    acks: tuple[Ack, ...]
    end: End | None
    push_s: float = 0.0
    """Seconds until the last ack came."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Progress of some replicas at one shard."""

    outcome: Outcome
    reason: str
    timeline: int
    replicas: Mapping[int, int]
    step_max: int
    version: int
    last_seq: int


class Sink(Protocol):
    """Takes pulled buckets. Called on the exchanging thread, bucket after bucket."""

    def buffer(self, arrival: Arrival) -> memoryview:
        """Writable memory of payload_bytes for this bucket."""
        ...

    def done(self, arrival: Arrival) -> None:
        """All bytes of the bucket are in the memory that buffer() gave; or it is unchanged, or has no bytes."""
        ...

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        """All bytes of the bucket are in somebody else's memory, to be copied from before this returns."""
        ...
