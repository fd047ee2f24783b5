"""Gradients of a step on their way out: filled per replica, summed over whole tree blocks, encoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardline.client.layout import fill_bucket, present_bits
from shardline.contributions import Contributions, Partial
from shardline.lanes.base import BucketPayload, Contribution, Whole
from shardline.reduce import Block
from shardline.sharding import Plan
from shardline.spec import DTYPES, TensorKind
from shardline.wire.codecs import RAW, codec_for
from shardline.wire.frames import digest


@dataclass
class StepExtras:
    """What goes with a step's pushes besides gradients."""

    hyper: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    nonfinite: list[str] = field(default_factory=list)
    samples: dict[int, int] = field(default_factory=dict)
    """Samples by replica."""


class Staging:
    """Flat bucket tensors of one worker, reused from step to step.

    presum: add up the gradients of a whole block of replicas before sending (bits stay the same). Off in the first
    step after a (re)start, when parts of a block may be counted already.
    """

    def __init__(self, plan: Plan, replicas: int, codec: str) -> None:
        self._plan = plan
        self._replicas = replicas
        self._codec = codec
        self._free: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._lent: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._sums: dict[tuple[int, int], Contributions] = {}
        self._singles: dict[tuple[int, int], dict[Block, Partial]] = {}
        self.extras = StepExtras()

    def clear(self) -> None:
        """Start a step: all memory is free again, since the pushes it held are acknowledged or given up."""
        for key, lent in self._lent.items():
            self._free.setdefault(key, []).extend(lent)
        self._lent.clear()
        self._sums.clear()
        self._singles.clear()
        self.extras = StepExtras()

    def _buffer(self, key: tuple[int, int]) -> torch.Tensor:
        free = self._free.get(key)
        spec = self._plan.shards[key[0]].buckets[key[1]]
        buffer = free.pop() if free else torch.zeros(spec.elements, dtype=DTYPES[spec.dtype])
        self._lent.setdefault(key, []).append(buffer)
        return buffer

    def add(
        self, replica: int, gradients: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor], *, presum: bool
    ) -> None:
        """Take one replica's gradients and (replica 0's) changed buffers, by tensor number. They are copied."""
        for s, shard in enumerate(self._plan.shards):
            for b, bucket in enumerate(shard.buckets):
                source = buffers if bucket.kind is TensorKind.BUFFER else gradients
                values: torch.Tensor | None = None
                present = (False,) * len(bucket.slices)
                if any(piece.tensor in source for piece in bucket.slices):
                    values = self._buffer((s, b))
                    present = fill_bucket(self._plan, bucket, values, source)
                block = Block(replica, 1)
                if presum:
                    sums = self._sums.setdefault((s, b), Contributions(bucket, self._replicas))
                    sums.add(block, values, present, 0)
                else:
                    self._singles.setdefault((s, b), {})[block] = Partial(values, present)

    def _partials(self, shard: int, bucket: int) -> dict[Block, Partial]:
        held = dict(self._singles.get((shard, bucket), {}))
        if (shard, bucket) in self._sums:
            held.update(self._sums[(shard, bucket)].partials())
        return held

    def blocks(self) -> list[Block]:
        """Blocks to push, in order."""
        return sorted(self._partials(0, 0))

    def contribution(self, shard: int, block: Block, **more: object) -> Contribution:
        """The encoded push of one block to one shard; `more` are further fields of Contribution."""
        payloads, empty = [], []
        for b, bucket in enumerate(self._plan.shards[shard].buckets):
            partial = self._partials(shard, b)[block]
            if partial.values is None:
                empty.append(b)
                continue
            data = codec_for(self._codec, bucket).encode(partial.values)
            payloads.append(
                BucketPayload(
                    bucket=b,
                    dtype=bucket.dtype,
                    elements=bucket.elements,
                    present=present_bits(partial.present),
                    data=data,
                    raw_bytes=bucket.nbytes,
                    digest=digest(data),
                )
            )
        samples = sum(self.extras.samples.get(replica, 0) for replica in range(block.first, block.end))
        return Contribution(
            payloads=Whole(payloads, empty),
            block=block,
            hyper=self.extras.hyper,
            nonfinite=tuple(self.extras.nonfinite),
            num_samples=samples,
            codec=self._codec,
            **more,  # type: ignore[arg-type]
        )


def initial_contribution(plan: Plan, shard: int, values: Sequence[torch.Tensor]) -> Contribution:
    """The INIT push of one shard; values: flat CPU tensors by bucket. Always raw: first values lose nothing."""
    payloads = []
    for b, (bucket, flat) in enumerate(zip(plan.shards[shard].buckets, values, strict=True)):
        data = RAW.encode(flat)
        payloads.append(
            BucketPayload(
                bucket=b,
                dtype=bucket.dtype,
                elements=bucket.elements,
                present=b"",
                data=data,
                raw_bytes=bucket.nbytes,
                digest=digest(data),
            )
        )
    return Contribution(payloads=Whole(payloads), init=True)
