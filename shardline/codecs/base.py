"""The codec seam: what a method of compression says of itself, and the objects that it makes.

A codec is a choice: a name and settings. Its encoder and decoder belong to one bucket of a plan and keep nothing. What
an encoding depends on and what it leaves behind is in the Turn that it gets, so encoders are shared by everybody, and
error memory is committed, dropped or restored without asking the codec.
"""

from __future__ import annotations

import enum
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from shardline.core.plan import BucketSpec, quantum_rows
from shardline.core.spec import DTYPES, TensorKind, TensorSpec
from shardline.core.tensor_bytes import Buffer
from shardline.errors import ProtocolError
from shardline.seams import Resident


class Direction(enum.Enum):
    """Which way a codec's payloads travel; the other way carries tensors as they are."""

    PUSH = enum.auto()
    """Gradients, from a worker to a server."""
    PULL = enum.auto()
    """Parameters, from a server to a worker."""
    BOTH = enum.auto()


class Scope(enum.Enum):
    """What is encoded as one: a scale or a choice of entries covers this much."""

    TENSOR = enum.auto()
    """The part of a tensor that a bucket holds: all of it where the plan doesn't cut it (see Codec.wants_whole)."""
    QUANTUM = enum.auto()
    """A quantum of a tensor's rows (core.plan): the bits don't depend on where the plan cuts."""
    BUCKET = enum.auto()
    """The flat bucket, padding included; for codecs that work element by element."""


class Memory(enum.Enum):
    """What a codec remembers from one encoding to the next, and what becomes of it when the job goes back.

    Memory of pushes belongs to (replica, tensor), or (worker, tensor) where workers push for themselves; that of pulls
    to (receiving task, tensor). It changes when a push counts, not when it is encoded. A replica that moves to another
    worker (a death) or that a new process takes up (a resume) starts from zero.
    """

    NONE = enum.auto()
    """Nothing."""
    DROPPED = enum.auto()
    """After a rollback it starts from zero."""
    RESTORED = enum.auto()
    """A worker keeps that of its last checkpoint steps: after a rollback to one of them it is as it was then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of one tensor within a bucket: what one scale or choice of entries covers."""

    tensor: TensorSpec
    first_row: int
    offset: int
    """Elements from the start of the bucket."""
    elements: int
    piece: int
    """Number of the bucket's slice that it lies in; see Turn.present."""

    @property
    def end(self) -> int:
        """Offset of the first element behind it."""
        return self.offset + self.elements

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its tensor."""
        return self.elements == self.tensor.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What an encoder and a decoder are made for: a bucket, and the plan's tensors that its slices number."""

    bucket: BucketSpec
    tensors: Sequence[TensorSpec]

    def parts(self, scope: Scope) -> Iterator[Part]:
        """Parts in the order of the bucket; Scope.BUCKET counts as Scope.TENSOR. Padding is in none."""
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
"""(tensor, first row of the part, what is remembered)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One encoding or decoding: everything that it may depend on besides the numbers.

    The same turn with the same numbers gives the same bytes, so randomness comes from generator() alone.
    """

    step: int = 0
    """Of the push: the synchronous step, or the worker's count of pushes. Of a pull: the step that is sent."""
    replica: int = 0
    """Whose gradient it is; the worker's number where workers push for themselves."""
    seed: int = 0
    """The job's. Decoders don't get it: a payload says what its decoder needs."""
    present: Sequence[bool] = ()
    """Which slices of the bucket have a gradient; empty = all. The others' zeros are not looked at by anybody."""
    receiver: str = ""
    """Task that a pull is for."""
    base: int | None = None
    """Step of the values that the receiver of a pull holds already, None = none: deltas are taken from these."""
    memory: MutableMapping[MemoryKey, torch.Tensor] = field(default_factory=dict)
    """What the turn before has left; what is put here is there in the next one. Tensors in it are never written to."""

    def has(self, piece: int) -> bool:
        """Whether a slice has a gradient."""
        return not self.present or self.present[piece]

    def generator(self, part: Part) -> torch.Generator:
        """Random numbers of (seed, step, replica, tensor, first row) and nothing else."""
        text = f"{self.seed},{self.step},{self.replica},{part.first_row},{part.tensor.name}"
        state = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(state, "little", signed=True))


PLAIN_TURN = Turn()
"""For codecs that look at nothing of it. Its memory stays empty."""


class Encoder(Protocol):
    """Writes the numbers of one bucket. Any thread may use it."""

    def encode(self, values: torch.Tensor, turn: Turn) -> Buffer:
        """Bytes of a 1-d CPU tensor in the bucket's layout, which is not written to; they may be a view of it."""
        ...


class Decoder(Protocol):
    """Reads the numbers of one bucket. Any thread may use it."""

    def decode(self, payload: Buffer, turn: Turn) -> torch.Tensor:
        """1-d CPU tensor in the bucket's layout and dtype, zero where the payload says nothing.

        It may share writable memory with the payload. Raises ProtocolError if the payload can't be one of this
        codec for this bucket; never takes more memory than payload and result.
        """
        ...


class Codec(Resident, ABC):
    """How a bucket's numbers are written on the wire. Residents are frozen dataclasses in CODECS."""

    direction: ClassVar[Direction] = Direction.BOTH
    scope: ClassVar[Scope] = Scope.BUCKET
    memory: ClassVar[Memory] = Memory.NONE
    exact: ClassVar[bool] = False
    """What is decoded has the bits of what was encoded, so gradients may be added up before they are sent."""
    is_view: ClassVar[bool] = False
    """A payload is the bucket's own memory: it may be read, and written, where the numbers lie. Implies `exact`."""
    fixed_size: ClassVar[bool] = True
    """Every payload of a bucket has max_bytes() bytes."""

    def takes(self, tensor: TensorSpec) -> bool:
        """Whether it is for this tensor; others travel as they are, beside it in one bucket too."""
        return tensor.kind is TensorKind.PARAM and tensor.dtype in ("float32", "float64")

    def wants_whole(self, shape: Sequence[int]) -> bool:
        """Whether it can't do with pieces of a tensor of this shape, so that the plan must not cut it."""
        return False

    @abstractmethod
    def max_bytes(self, layout: Layout) -> int:
        """No payload of the bucket is longer; at most the bytes of the bucket itself."""

    @abstractmethod
    def encoder(self, layout: Layout) -> Encoder:
        """What writes this bucket."""

    @abstractmethod
    def decoder(self, layout: Layout) -> Decoder:
        """What reads this bucket."""


def check_length(payload: Buffer, expected: int, elements: int, dtype: str) -> None:
    """Raise ProtocolError if a payload hasn't the length that it must have."""
    if len(payload) != expected:
        raise ProtocolError(f"payload of {len(payload)} bytes for {elements} {dtype} elements, expected {expected}")


def zeros(layout: Layout) -> torch.Tensor:
    """A flat bucket of zeros."""
    return torch.zeros(layout.bucket.elements, dtype=DTYPES[layout.bucket.dtype])
