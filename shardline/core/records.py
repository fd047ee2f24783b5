"""What a primary sends to its standby, as values: images, records and marks.

rpc.messages.records encodes them for the wire. PROTOCOL 1.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardline.core.choices import Choices
from shardline.core.image import BucketImage
from shardline.core.outcome import Outcome
from shardline.core.tensor_bytes import Buffer, tensor_bytes, tensor_from_bytes


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The verdict with which a shard has applied a voted step."""

    step: int
    scale: float
    skip: bool
    norm: float = 0.0
    choice: int = 0
    """Replicas whose gradients it was, see shardline.core.choices; 0 in modes without a choice."""


@dataclass(frozen=True, kw_only=True)
class AppliedPush:
    """Asynchronous mode: the last push of an incarnation of a worker that a shard has applied, and its outcome."""

    task: str
    incarnation: int
    last_seq: int
    outcome: Outcome
    staleness: int = 0


@dataclass(frozen=True, kw_only=True)
class RecordPart:
    """One bucket's part of a record. values: the gradient's bytes, padding included; None if there is none."""

    bucket: int
    step: int
    """The bucket's step before the record."""
    values: Buffer | None
    dtype: str
    present: tuple[bool, ...]
    hyper: Mapping[str, float] | None = None

    @classmethod
    def of(
        cls,
        bucket: int,
        step: int,
        values: torch.Tensor | None,
        present: tuple[bool, ...],
        hyper: Mapping[str, float] | None,
    ) -> RecordPart:
        """A part with a copy of a gradient, which its owner may overwrite afterwards."""
        dtype = "float32" if values is None else str(values.dtype).removeprefix("torch.")
        data = None if values is None else bytes(tensor_bytes(values.cpu()))
        return cls(bucket=bucket, step=step, values=data, dtype=dtype, present=present, hyper=hyper)

    def tensor(self) -> torch.Tensor | None:
        """The gradient, in its own memory."""
        return None if self.values is None else tensor_from_bytes(self.values, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Header of a stream. copy: the copy that records belong to; 0 = none yet. appointment: see Placement."""

    job: str
    timeline: int
    plan_id: str
    shard: int
    task: str
    copy: int
    appointment: int = 0


@dataclass(frozen=True)
class Begin:
    """Start of a new copy: the standby refuses to be promoted until the mark."""

    copy: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One decision of the primary: gradients for some buckets, applied together."""

    number: int
    parts: tuple[RecordPart, ...]
    scale: float = 1.0
    skip: bool = False
    verdict: Applied | None = None
    push: AppliedPush | None = None


@dataclass(frozen=True, kw_only=True)
class Image:
    """One bucket's current contents."""

    number: int
    image: BucketImage


@dataclass(frozen=True, kw_only=True)
class Mark:
    """End of a copy: from now on the standby may be promoted."""

    number: int
    pushes: tuple[AppliedPush, ...] = ()
    verdict: Applied | None = None
    choices: Choices = field(default_factory=Choices)


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Digest of the primary's bucket right after record `number`."""

    number: int
    bucket: int
    digest: int
