"""Memory of a shard's published parameters: two flat areas, each with all buckets in sequence. PROTOCOL 1.9.

A bucket's theta_t is in area t & 1. The layout depends only on the shard's plan, so that a worker on the same host that
maps the areas can find every bucket by itself.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardline.core.plan import BucketSpec, ShardSpec
from shardline.core.spec import DTYPES, TensorKind
from shardline.host.segments import layout


def bucket_offsets(spec: ShardSpec) -> tuple[int, ...]:
    """Offset in bytes of each bucket from an area's start, then the area's length."""
    return layout([bucket.nbytes for bucket in spec.buckets])


def num_areas(bucket: BucketSpec, *, keeps_previous: bool) -> int:
    """Number of areas that a bucket uses: one if the previous step is not kept, and for frozen buckets."""
    return 2 if keeps_previous and bucket.kind is not TensorKind.FROZEN else 1


class Publication(Protocol):
    """The memory of one shard's published values. It lives as long as any of its tensors."""

    def tensor(self, which: int, bucket: int) -> torch.Tensor:
        """The values of a bucket in area `which` (0 or 1): flat, the bucket's dtype, zeros at first."""

    def offset(self, bucket: int) -> int:
        """Offset in bytes from an area's start to the bucket, a multiple of 64; the same in both areas."""

    @property
    def nbytes(self) -> int:
        """Bytes of one area."""


class PlainPublication:
    """Ordinary memory of a device; each area is one allocation, made when its first tensor is requested."""

    def __init__(self, spec: ShardSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._offsets = bucket_offsets(spec)
        self._areas: dict[int, torch.Tensor] = {}

    def tensor(self, which: int, bucket: int) -> torch.Tensor:
        if which not in self._areas:
            # A frozen bucket's place in area 1 stays untouched, so the system gives it no memory.
            self._areas[which] = torch.zeros(self.nbytes, dtype=torch.uint8, device=self._device)
        return view_of(self._areas[which], self._spec.buckets[bucket], self._offsets[bucket])

    def offset(self, bucket: int) -> int:
        return self._offsets[bucket]

    @property
    def nbytes(self) -> int:
        return self._offsets[-1]


def view_of(area: torch.Tensor, bucket: BucketSpec, offset: int) -> torch.Tensor:
    """A bucket's values within an area. area: uint8, 1-d. offset: bytes."""
    return area[offset : offset + bucket.nbytes].view(DTYPES[bucket.dtype])
