"""The data of one exchange between a task and a shard: pushes, a pull, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardline.core.fixed import fixed
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.plan import BUCKET_BYTES
from shardline.core.reduce import Block
from shardline.core.tensor_bytes import Buffer

CHUNK_BYTES = BUCKET_BYTES
"""Maximum bytes of a bucket in one message of a push or pull: usually all of it, which then need not be reassembled."""


@dataclass(frozen=True, kw_only=True)
class Sender:
    job: str
    timeline: int
    plan_id: str
    who: Identity


@fixed(kw_only=True)
class BucketPayload:
    """One outgoing bucket. data: encoded bytes, unchanged until acknowledged (retries resend them)."""

    bucket: int
    dtype: str
    elements: int
    present: bytes
    """Bitmap of the slices that have a gradient; empty = all."""
    data: Buffer
    raw_bytes: int
    digest: int
    """Digest of `data`; 0 = the bytes were to stay in place. If they are sent after all, the lane computes it."""
    nonfinite: Sequence[str] = ()
    """Tensors of the bucket in which the worker found NaN or infinity (policy "skip")."""
    bound: float = 0.0
    """Upper bound of the elements' magnitudes, from the worker; 0 = unknown, or all are zero."""
    fingerprint: int = 0
    """Of `data`, see core.tensor_bytes.fingerprint; 0 = unknown."""


class Payloads(Protocol):
    """The encoded buckets of one push, some of them perhaps still being computed.

    May be iterated several times, by several threads: a retry starts again at the first bucket.
    """

    @property
    def nbytes(self) -> int:
        """Upper bound for the bytes of all payloads together, for deadlines."""
        ...

    @property
    def empty(self) -> Sequence[int]:
        """Buckets to which the push adds nothing; known once batches() has ended."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether all payloads are ready and in memory that the shard reads, as long as the lane shares memory."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether all payloads are ready, and few enough to be sent before anything is heard of them."""
        ...

    def batches(self) -> Iterator[Sequence[BucketPayload]]:
        """Yield ready payloads in the order of sending; waits for more until all have come. Ends early by raising."""
        ...


@fixed()
class Whole:
    items: Sequence[BucketPayload] = ()
    empty: Sequence[int] = ()
    in_place: bool = False
    at_once: bool = False

    @property
    def nbytes(self) -> int:
        return sum(len(item.data) for item in self.items)

    def batches(self) -> Iterator[Sequence[BucketPayload]]:
        if self.items:
            yield self.items


@fixed(kw_only=True)
class Contribution:
    payloads: Payloads
    step: int = 0
    block: Block = field(default_factory=lambda: Block(0, 1))
    seq: int = 0
    init: bool = False
    base_min: int = 0
    base_max: int = 0
    clock: int = 0
    """Bounded staleness: the worker's clock after this push."""
    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    codec: str = ""
    """Of the payloads; "" = not encoded."""
    nonfinite: Sequence[str] = ()
    num_samples: int = 0
    scale: float = 1.0
    skip: bool = False
    partial: bool = False
    """Buckets that it does not name come from other workers, which compute other stages of the same replica."""


@fixed(kw_only=True)
class Want:
    """The values to pull. step None = the latest, or with `ahead` the latest once the slowest are near enough."""

    step: int | None
    ahead: int | None = None
    """The steps that the puller has done, where who is too far ahead waits."""
    have_step: int | None = None
    buckets: Sequence[int] = ()
    """In the requested order; empty = all."""
    wait_s: float = 0.0


@fixed(kw_only=True)
class Arrival:
    """Header of one pulled bucket."""

    bucket: int
    step: int
    version: int
    unchanged: bool
    codec: str
    payload_bytes: int
    area: int = 0
    """shm: 0 or 1 = the shard's publication of even or odd steps, 2 = replies to this worker."""
    offset: int = 0
    """shm: offset in bytes from the start of the area."""


ACCEPTED = (
    Outcome.COUNTED,
    Outcome.STAGED,
    Outcome.APPLIED,
    Outcome.DUPLICATE,
    Outcome.LATE_DROPPED,
    Outcome.SKIPPED,
)
"""Outcomes of a push that needs no repetition: it counts, counted before, or came too late for its step."""


@fixed(kw_only=True)
class Ack:
    outcome: Outcome
    reason: str = ""
    step: int = 0
    version: int = 0
    staleness: int = 0
    next_seq: int = 0
    timeline: int = 0
    mismatch: bool = False
    """DUPLICATE: the contribution that the shard counted before has other bits."""

    @property
    def accepted(self) -> bool:
        """Whether the push needs no repetition."""
        return self.outcome in ACCEPTED


@fixed(kw_only=True)
class End:
    outcome: Outcome
    reason: str = ""
    step: int = 0
    version: int = 0
    timeline: int = 0
    waiting_for: tuple[int, ...] = ()
    wants_state: bool = False
    """Workers run the optimizer, and the shard lacks the state of `step` for a cut."""
    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Workers run the optimizer: hyper-parameters of the step that was closed, by parameter group."""


@fixed(kw_only=True)
class Exchanged:
    """Result of one exchange; `end` is None if nothing was pulled.

    It ends early at the first push that is not accepted: its ack is the last one, and the pull has no end.
    """

    acks: tuple[Ack, ...]
    end: End | None
    push_s: float = 0.0
    """Seconds until the last ack arrived."""


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
    wants_state: bool = False


class Sink(Protocol):
    """Receives pulled buckets, one after another. Called on the exchanging thread."""

    def buffer(self, arrival: Arrival) -> memoryview:
        """Writable memory of payload_bytes bytes for this bucket. Raises ProtocolError."""
        ...

    def done(self, arrival: Arrival) -> None:
        """All bytes of the bucket are in the memory from buffer(); or it is unchanged, or has no bytes."""
        ...

    def whole(self, arrival: Arrival, payload: Buffer) -> None:
        """All bytes of the bucket are in this memory, which nobody writes to: it came in one message.

        Raises ProtocolError as buffer() does.
        """
        ...

    def take(self, arrival: Arrival, memory: memoryview) -> None:
        """All bytes of the bucket are in foreign memory, which must be copied before this returns."""
        ...
