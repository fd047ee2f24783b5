"""The codec seam: the declaration of a compression method, and the objects that it makes.

A codec is a choice: a name and settings. Its encoder and decoder belong to one bucket of a plan and have no state. The
Turn passed to them has all inputs and outputs of an encoding besides the numbers, so encoders can be shared, and error
memory is committed, dropped or restored without the codec's help.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Protocol, cast

import torch

from shardline.core.fixed import fixed
from shardline.core.plan import BucketSpec, quantum_rows
from shardline.core.spec import DTYPES, TensorKind, TensorSpec
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.seams import Resident


class Direction(enum.Enum):
    """Direction in which a codec is used; the other direction carries unencoded tensors."""

    PUSH = enum.auto()
    """Gradients, from a worker to a server."""
    PULL = enum.auto()
    """Parameters, from a server to a worker."""
    BOTH = enum.auto()


class Scope(enum.Enum):
    """The unit of encoding, covered by one scale or one choice of entries."""

    TENSOR = enum.auto()
    """The part of a tensor in a bucket: all of it if the plan doesn't cut it (see Codec.wants_whole)."""
    QUANTUM = enum.auto()
    """A quantum of a tensor's rows (core.plan): the bits don't depend on where the plan cuts."""
    BUCKET = enum.auto()
    """The flat bucket, padding included; for codecs that work element by element."""


class Fidelity(enum.IntEnum):
    """How near decoded numbers are to the encoded ones."""

    LOSSY = enum.auto()
    """Other numbers; NaN and infinity come back as something that is not finite, anywhere in their part."""
    ROUNDED = enum.auto()
    """Each number is rounded; NaN and infinity come back as such."""
    EXACT = enum.auto()
    """The bits that were encoded, so gradients may be added up before they are sent."""
    VIEW = enum.auto()
    """A payload is the bucket's own memory: it may be read and written in place."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a codec remembers between encodings, and what happens to it when the job goes back.

    Memory of pushes is kept per (replica, tensor), or (worker, tensor) if workers push for themselves; memory of pulls
    per (receiving task, tensor). It changes when a push counts, not when it is encoded. If a replica moves to another
    worker (after a death) or to a new process (a resume), it starts from zero; see also Turn.whole.
    """

    restored: bool = False
    """A worker keeps the memory of its last checkpoint steps: a rollback to one of them restores it. False: it starts
    from zero after a rollback."""
    shared: bool = False
    """All receivers of a pull share one memory, so that each of them has to pull every step."""
    reset_every: int = 0
    """Steps between two pulls that depend on no memory, where a job may go back to; 0 = all are such, or none."""
    copies: int = 0
    """Most memory of the sender of pulls, in sizes of the buckets."""

    NONE: ClassVar[Memory]
    DROPPED: ClassVar[Memory]
    RESTORED: ClassVar[Memory]

    def keeps(self, base: int | None, step: int) -> bool:
        """Whether a receiver with the values of `base`, which have not changed since, has what `step` would bring."""
        every = self.reset_every
        return base is not None and (not every or base // every == step // every)


Memory.NONE, Memory.DROPPED, Memory.RESTORED = Memory(), Memory(), Memory(restored=True)


def the_mean(mean: torch.Tensor) -> torch.Tensor:
    """Apply the mean of the decoded gradients as it is."""
    return mean


@dataclass(frozen=True, kw_only=True)
class AtServer:
    """What servers do with the gradients that a codec decodes."""

    combine: Callable[[torch.Tensor], torch.Tensor] = the_mean
    """Makes what they apply of the mean, both flat; a new tensor, or the mean itself."""
    rule: str = ""
    """Update rule that they have to run, with the job's optimizer; "" = any."""

    @property
    def votes(self) -> bool:
        """Whether they apply something else than the mean."""
        return self.combine is not the_mean


MEAN = AtServer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of one tensor within a bucket, covered by one scale or choice of entries."""

    tensor: TensorSpec
    first_row: int
    offset: int
    """Elements from the start of the bucket."""
    elements: int
    piece: int
    """Number of the bucket's slice that contains it; see Turn.present."""

    @property
    def end(self) -> int:
        """Offset of the first element after it."""
        return self.offset + self.elements

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensor."""
        return DTYPES[self.tensor.dtype]

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.elements == self.tensor.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The input for making an encoder or decoder: a bucket, and the plan's tensors, as numbered by its slices."""

    bucket: BucketSpec
    tensors: Sequence[TensorSpec]

    def parts(self, scope: Scope) -> Iterator[Part]:
        """Parts in the order of the bucket, without padding; Scope.BUCKET is treated as Scope.TENSOR."""
        for number, piece in enumerate(self.bucket.slices):
            tensor = self.tensors[piece.tensor]
            width = tensor.row_elements
            step = quantum_rows(tensor) if scope is Scope.QUANTUM else max(1, piece.rows)
            for row in range(0, piece.rows, step):
                rows = min(step, piece.rows - row)
                yield Part(
                    tensor=tensor,
                    first_row=piece.first_row + row,
                    offset=piece.offset + row * width,
                    elements=min(rows * width, piece.elements - row * width),
                    piece=number,
                )


MemoryKey = tuple[str, int, str]
"""(tensor, first row of the part, name of the memory)."""


@fixed()
class Turn:
    """One encoding or decoding: everything that it may depend on besides the numbers.

    The same turn with the same numbers gives the same bytes, so random numbers come only from generator().
    """

    step: int = 0
    """For a push: the synchronous step, or the worker's count of pushes. For a pull: the step that is sent."""
    replica: int = 0
    """The gradient's replica; the worker's number if workers push for themselves."""
    seed: int = 0
    """The job's seed. Decoders don't get it: the payload contains all that its decoder needs."""
    present: Sequence[bool] = ()
    """Which slices of the bucket have a gradient; empty = all. The zeros of the others are never read."""
    receiver: str = ""
    """Task that pulls."""
    base: int | None = None
    """Step of the values that the pull's receiver already has, None = none: deltas are relative to these."""
    changed: int = 0
    """For a pull: the step that last changed the bucket. Up to the next one its values stay what they are."""
    whole: bool = False
    """For a push by a codec with memory: send the values and all that is owed, as the bucket's own bytes, and clear
    the memory."""
    relays: bool = False
    """Whoever decodes hands on what it gets: the same memory then serves its own encodings."""
    owes: bool = True
    """False: whoever encodes makes up by himself for what is not sent, so no error is to be remembered."""
    memory: MutableMapping[MemoryKey, torch.Tensor] = field(default_factory=dict)
    """Tensors left by the previous turn; those put here are available in the next. They are never written to."""

    def has(self, piece: int) -> bool:
        """Whether a slice has a gradient."""
        return not self.present or self.present[piece]

    def seed_of(self, part: Part) -> int:
        """64 bits that depend only on (seed, step, replica, tensor, first row)."""
        text = f"{self.seed},{self.step},{self.replica},{part.first_row},{part.tensor.name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def generator(self, part: Part) -> torch.Generator:
        """Random numbers that depend only on the same."""
        seed = self.seed_of(part)
        return torch.Generator().manual_seed(seed - (1 << 64) if seed >> 63 else seed)


PLAIN_TURN = Turn(memory=cast(MutableMapping[MemoryKey, torch.Tensor], MappingProxyType({})))
"""For codecs that don't use a turn. It has no memory."""


class Coder(Protocol):
    """Encodes and decodes the numbers of one bucket. Any thread may use it."""

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        """Bytes for a 1-d CPU tensor in the bucket's layout, possibly a view of it. The tensor is not written to."""
        ...

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """1-d CPU tensor in the bucket's layout and dtype, zero for elements not in the payload.

        It may share writable memory with the payload. Raises ProtocolError if the payload can't be one of this codec
        for this bucket; never takes more memory than payload and result.
        """
        ...


class Codec(Resident, ABC):
    """How a bucket's numbers are written on the wire. Residents are frozen dataclasses in CODECS."""

    direction: ClassVar[Direction] = Direction.BOTH
    scope: ClassVar[Scope] = Scope.BUCKET
    fidelity: ClassVar[Fidelity] = Fidelity.ROUNDED

    @property
    def at_server(self) -> AtServer:
        """What servers do with what they decode."""
        return MEAN

    @property
    def memory(self) -> Memory:
        """What it remembers from one encoding to the next."""
        return Memory.NONE

    @property
    def has_momentum(self) -> bool:
        """Whether it adds momentum to gradients on each worker, so that no other part of the job may."""
        return False

    @property
    def exact(self) -> bool:
        """Whether decoding gives the bits that were encoded."""
        return self.fidelity >= Fidelity.EXACT

    @property
    def relayable(self) -> bool:
        """Whether decoded numbers that are encoded again are decoded as the same numbers.

        A codec with one memory for all receivers sees to it itself: see Turn.relays.
        """
        return self.memory.shared or (self.memory is Memory.NONE and self.fidelity is not Fidelity.LOSSY)

    @property
    def is_view(self) -> bool:
        """Whether a payload is the bucket's own memory."""
        return self.fidelity is Fidelity.VIEW

    def takes(self, tensor: TensorSpec) -> bool:
        """Whether it encodes this tensor; other tensors are not encoded, even in the same bucket."""
        return tensor.kind is TensorKind.PARAM and tensor.dtype in ("float32", "float64")

    def stays_finite(self, magnitude: float) -> bool:
        """Whether a finite number of this magnitude is decoded as one."""
        return True

    def wants_whole(self, shape: Sequence[int]) -> bool:
        """Whether it can't encode pieces of a tensor of this shape, so that the plan must not cut it."""
        return False

    @abstractmethod
    def sizes(self, layout: Layout) -> tuple[int, int]:
        """Least and most bytes of the bucket's payloads: equal if all have one size, never more than the bucket's own.

        Where few bytes may stand for many, a receiver that does not know its sender trusts the least.
        """

    def usual_bytes(self, layout: Layout) -> int:
        """An upper bound for payloads after a warm-up, if there is one, and that are not whole; see Turn.whole."""
        return self.sizes(layout)[1]

    @abstractmethod
    def coder(self, layout: Layout) -> Coder:
        """The coder of this bucket."""


def check_length(payload: Buffer, expected: int, elements: int, dtype: str) -> None:
    """Raise ProtocolError if a payload does not have the expected length in bytes."""
    if len(payload) != expected:
        raise ProtocolError(f"payload of {len(payload)} bytes for {elements} {dtype} elements; expected {expected}")


def zeros(layout: Layout) -> torch.Tensor:
    """A flat bucket of zeros."""
    return torch.zeros(layout.bucket.elements, dtype=DTYPES[layout.bucket.dtype])
