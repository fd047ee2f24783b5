"""Codecs: how a bucket's numbers are encoded for transfer. A new one is one file and an entry in CODECS."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardline.codecs.base import Codec
from shardline.codecs.cast import Bf16, Fp16
from shardline.codecs.coding import JobCoding
from shardline.codecs.raw import Raw
from shardline.core.plan import Plan
from shardline.core.spec import TensorSpec
from shardline.seams import Table

CODECS: Table[Codec] = Table("codec", Raw, Bf16, Fp16)


def coding_of(choice: str | Codec, plan: Plan) -> JobCoding:
    """A job's codec for its plan. Raises JobError for an unknown codec."""
    return JobCoding(CODECS.parse(choice), plan)


def keep_whole(choice: str | Codec, tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """A job's tensors, with those marked whole that its codec can't encode in pieces. Raises JobError."""
    codec = CODECS.parse(choice)
    return tuple(
        replace(tensor, whole=True) if codec.takes(tensor) and codec.wants_whole(tensor.shape) else tensor
        for tensor in tensors
    )


__all__ = ["CODECS", "Codec", "coding_of", "keep_whole"]
