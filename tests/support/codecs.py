"""Builders for tests of codecs: every codec with some settings, plans of one bucket, values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardline.codecs import CODECS
from shardline.codecs.base import Codec, Layout, MemoryKey, Turn
from shardline.codecs.coding import BucketCoding, Coding
from shardline.core.plan import Plan, make_plan
from shardline.core.spec import DTYPES, TensorKind, TensorSpec

FLOATS = ("float32", "float64")
MORE = {
    "top": ("top:ratio=0.25", "top:ratio=1.0"),
    "int8": ("int8:stochastic=true", "int8:block=8"),
    "fp8": ("fp8:kind=e5m2",),
    "qsgd": ("qsgd:levels=1", "qsgd:levels=5,block=64"),
    "terngrad": ("terngrad:clip=0.0",),
    "twobit": ("twobit:threshold=0.5", "twobit:threshold=0.5,absolute=true"),
    "topk": ("topk:ratio=0.25", "topk:ratio=1.0"),
    "randomk": ("randomk:ratio=0.25", "randomk:ratio=1.0"),
    "powersgd": ("powersgd:rank=1", "powersgd:rank=8"),
    "onebit-adam": ("onebit-adam:warmup=1,momentum=0.0",),
    "dgc": ("dgc:ratio=0.25", "dgc:ratio=0.25,momentum=0.0", "dgc:ratio=1.0", "dgc:warmup=10,clip=1.0"),
}
"""Further settings of some codecs; the others are tested with their defaults."""


def choices() -> Iterator[Codec]:
    for resident in CODECS:
        for text in (resident.name, *MORE.get(resident.name, ())):
            yield CODECS.parse(text)


def spec(name: str, shape: Sequence[int], dtype: str = "float32", kind: TensorKind = TensorKind.PARAM) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=kind)


def model(dtype: str = "float32", kind: TensorKind = TensorKind.PARAM) -> Plan:
    """One bucket: a matrix, a vector that needs padding, a scalar, an empty tensor; and a trained tensor."""
    shapes = {"matrix": (40, 32), "vector": (33,), "scalar": (), "empty": (3, 0)}
    tensors = [spec(name, shape, dtype, kind) for name, shape in shapes.items()]
    return make_plan([*tensors, spec("trained", (4,))], 1)


def first(codec: Codec, plan: Plan) -> BucketCoding:
    """The bucket of `matrix`, pushed or pulled, whichever the codec is for."""
    coding = Coding(codec, plan)
    buckets = range(len(plan.shards[0].buckets))
    found = [coding.bucket(0, number) for number in buckets]
    return next(
        item for item in found if any(plan.tensors[s.tensor].name == "matrix" for s in item.layout.bucket.slices)
    )


def numbers(layout: Layout, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random values for all slices; padding is zero."""
    bucket = layout.bucket
    draw = torch.randn(bucket.elements, generator=torch.Generator().manual_seed(seed)) * 40.0 * scale
    dtype = DTYPES[bucket.dtype]
    drawn = draw > 0 if dtype is torch.bool else draw.abs().to(dtype) if dtype is torch.uint8 else draw.to(dtype)
    values = torch.zeros(bucket.elements, dtype=dtype)
    for piece in bucket.slices:
        values[piece.offset : piece.end] = drawn[piece.offset : piece.end]
    return values


def turn(step: int = 0, replica: int = 0, memory: dict[MemoryKey, torch.Tensor] | None = None) -> Turn:
    return Turn(step, replica, seed=7, memory={} if memory is None else memory)
