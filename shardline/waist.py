"""The waist of the system: a sender exchanges pushes and a pull with one shard. Read this file first.

Everything on a worker's side of it (models, codecs, cadences, pipelines) ends in an exchange; everything on the other
side (consistency modes, update rules, checkpoints, standbys) begins with one. A shard of a parameter server, a worker's
connection to it, an aggregator and a simulated server are all a ShardService; tests/conformance/test_exchange.py holds
for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardline.core.fixed import fixed
from shardline.core.identity import Identity
from shardline.core.outcome import Outcome
from shardline.core.plan import BUCKET_BYTES
from shardline.core.reduce import Block
from shardline.core.tensor_bytes import Buffer, tensor_bytes
from shardline.errors import ProtocolError

CHUNK_BYTES = BUCKET_BYTES
"""Maximum bytes of a bucket in one message of a push or pull: usually all of it, which then need not be reassembled."""


class ShardService(Protocol):
    """One shard, wherever it is. Used by one thread at a time, unless an implementation allows more."""

    def exchange(
        self, sender: Sender, pushes: Sequence[Push], want: Want | None, sink: Sink, *, timeout_s: float
    ) -> Exchanged:
        """Push, each push after the one before it, and pull. A pull may be answered in part while pushes are sent.

        Raises UnreachableError if no answer came within timeout_s seconds, and ProtocolError, TensorError or
        NonFiniteError for a push or a want that the shard can't take: nothing was changed then.
        """

    def standing(self, sender: Sender, replicas: Sequence[int], *, timeout_s: float) -> Standing:
        """The shard's progress, and that of some replicas. Raises UnreachableError.

        Where a pull waits for senders that are behind, naming a replica says that this one computes, naming none that
        it rests.
        """


@dataclass(frozen=True, kw_only=True)
class Sender:
    job: str
    timeline: int
    plan_id: str
    who: Identity
    beside: bool = False
    """This is its second connection to the shard, beside the one by which it pushes."""


Memory = Buffer | torch.Tensor
"""Bytes of the host, or a flat tensor on any device."""


def octets(memory: Memory) -> Buffer:
    """The bytes in host memory: a view, or a copy of what is on another device."""
    return tensor_bytes(memory.cpu()) if isinstance(memory, torch.Tensor) else memory


class DeviceEvent(Protocol):
    """A point in a device's work, such as a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until the work before it is done."""


@fixed(kw_only=True)
class Payload:
    """One outgoing bucket, in the memory of a device.

    data: as its codec has encoded it, unchanged until the push is acknowledged (retries send it again).
    """

    bucket: int
    dtype: str
    elements: int
    present: bytes
    """Bitmap of the slices that have a gradient; empty = all."""
    data: Memory
    raw_bytes: int
    digest: int
    """Digest of `data`; 0 = unknown. Who sends bytes to another process computes it then."""
    ready: DeviceEvent | None = None
    """`data` may be read after it; None = now."""
    nonfinite: Sequence[str] = ()
    """Tensors of the bucket in which the worker found NaN or infinity (policy "skip")."""
    bound: float = 0.0
    """Upper bound of the elements' magnitudes, from the worker; 0 = unknown, or all are zero."""
    fingerprint: int = 0
    """Of `data`, see core.tensor_bytes.fingerprint; 0 = unknown."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, torch.Tensor) else len(self.data)

    @property
    def octets(self) -> Buffer:
        """Its bytes in host memory: a view, or a copy if they are on another device. Waits until they are ready."""
        if self.ready is not None:
            self.ready.synchronize()
        return octets(self.data)


class Payloads(Protocol):
    """The encoded buckets of one push, some of them perhaps still being computed.

    May be iterated several times, by several threads: a retry starts again at the first bucket.
    """

    @property
    def nbytes(self) -> int:
        """Upper bound for the bytes of all payloads together, for deadlines."""

    @property
    def empty(self) -> Sequence[int]:
        """Buckets to which the push adds nothing; known once batches() has ended."""

    @property
    def in_place(self) -> bool:
        """Whether all payloads are ready, in memory that the shard can read too: then nothing need be sent."""

    @property
    def at_once(self) -> bool:
        """Whether all payloads are ready, and few enough to be sent before anything is heard of them."""

    def batches(self) -> Iterator[Sequence[Payload]]:
        """Yield ready payloads in the order of sending; waits for more until all have come. Ends early by raising."""


@fixed()
class Whole:
    items: Sequence[Payload] = ()
    empty: Sequence[int] = ()
    in_place: bool = False
    at_once: bool = False

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def batches(self) -> Iterator[Sequence[Payload]]:
        if self.items:
            yield self.items


@fixed(kw_only=True)
class Push:
    """Gradients with their origins: a block of replicas of a step, or a worker that numbers its pushes (seq)."""

    payloads: Payloads
    step: int = 0
    block: Block = field(default_factory=lambda: Block(0, 1))
    """The replicas whose gradients are added up in it: a worker's own, or all those below an aggregator."""
    seq: int = 0
    """The worker's number of this push, from 1; 0 = it belongs to a step."""
    by: Identity | None = None
    """The worker whose number it is; None = the sender."""
    base_min: int = 0
    """Lowest version of the values that the gradients were computed from; base_max: the highest."""
    base_max: int = 0
    clock: int = 0
    """The worker's clock after this push, where those that are ahead wait."""
    init: bool = False
    """It has initial values instead of gradients."""
    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    codec: str = ""
    """Of the payloads; "" = not encoded."""
    nonfinite: Sequence[str] = ()
    num_samples: int = 0
    scale: float = 1.0
    skip: bool = False
    partial: bool = False
    """The buckets that it does not name come in pushes of others."""


@fixed(kw_only=True)
class Want:
    """The values to pull. step None = the latest, or with `ahead` the latest once the slowest are near enough."""

    step: int | None
    ahead: int | None = None
    """The steps that the puller has done, where who is too far ahead waits."""
    have_step: int | None = None
    buckets: Sequence[int] = ()
    """In the requested order; empty = all."""
    rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Ids (int64 [U]) of a table's rows, by bucket: its payload is these rows, in this order. Other buckets of tables
    are answered as unchanged; other buckets that are not of tables can't be among them."""
    wait_s: float = 0.0
    """Seconds that the values may be waited for; 0 = the shard's default."""


@fixed(kw_only=True)
class Arrival:
    """Header of one pulled bucket."""

    bucket: int
    step: int
    version: int
    unchanged: bool
    codec: str
    payload_bytes: int
    lasting: bool = False
    """For take(): the memory is where the shard publishes; the values stay until the puller has contributed to them."""
    place: tuple[int, int] = (0, 0)
    """For those who carry it: where its bytes are."""


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

    def done(self, arrival: Arrival) -> None:
        """All bytes of the bucket are in the memory from buffer(); or it is unchanged, or has no bytes."""

    def whole(self, arrival: Arrival, payload: Memory) -> None:
        """All bytes of the bucket are in this memory, which nobody writes to: it came in one message.

        Raises ProtocolError as buffer() does.
        """

    def take(self, arrival: Arrival, memory: Memory) -> None:
        """All bytes of the bucket are in foreign memory, which must be copied before this returns."""


def refuse_rows(bucket: int) -> ProtocolError:
    """The error of a shard whose bucket is not one of a table."""
    return ProtocolError(f"bucket {bucket}: the pull names single rows of a table, and this bucket is not one's")
