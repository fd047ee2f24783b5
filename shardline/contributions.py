"""Contributions of one step to one bucket, summed by the canonical tree as soon as siblings meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardline.reduce import Block, sibling
from shardline.sharding import BucketSpec

Present = tuple[bool, ...]


@dataclass
class Partial:
    """The sum over one block. values: flat, in the bucket's layout; None where no slice has a gradient."""

    values: torch.Tensor | None
    present: Present


def merge(left: Partial, right: Partial, bucket: BucketSpec) -> Partial:
    """Add right to left in place. A slice absent on one side takes the other's bits: not even a zero is added."""
    if right.values is None:
        return left
    if left.values is None:
        return right
    if all(left.present) and all(right.present):
        left.values.add_(right.values)
        return left
    for number, piece in enumerate(bucket.slices):
        if not right.present[number]:
            continue
        mine, theirs = left.values[piece.offset : piece.end], right.values[piece.offset : piece.end]
        if left.present[number]:
            mine.add_(theirs)
        else:
            mine.copy_(theirs)
    return Partial(left.values, tuple(a or b for a, b in zip(left.present, right.present, strict=True)))


class Contributions:
    """Which replicas are counted in the open step, and the partial sums. The bucket's lock guards it."""

    def __init__(self, bucket: BucketSpec, replicas: int) -> None:
        self._bucket = bucket
        self._replicas = replicas
        self._partials: dict[Block, Partial] = {}
        self._digests: dict[Block, int] = {}
        self.counted: set[int] = set()

    def add(self, block: Block, values: torch.Tensor | None, present: Present, digest: int) -> None:
        """Count a block that the rule admitted. The tensor belongs to the contributions from now on."""
        self.counted.update(range(block.first, block.end))
        self._digests[block] = digest
        partial = Partial(values, present)
        # Climb while the sibling is there: the order of arrival never changes the order of additions.
        while (family := sibling(block, self._replicas)) is not None:
            parent, left, right = family
            other = right if block == left else left
            if other not in self._partials:
                break
            partner = self._partials.pop(other)
            partial = merge(partial, partner, self._bucket) if block == left else merge(partner, partial, self._bucket)
            block = parent
        self._partials[block] = partial

    def digest_differs(self, block: Block, digest: int) -> bool:
        """Whether a repeated contribution of this block carries other bits than the one that was counted."""
        known = self._digests.get(block, 0)
        return bool(known and digest and known != digest)

    @property
    def complete(self) -> bool:
        """All replicas are counted."""
        return len(self.counted) == self._replicas

    def partials(self) -> dict[Block, Partial]:
        """The partial sums held, by block."""
        return dict(self._partials)

    def missing(self) -> list[int]:
        """Replicas not counted yet."""
        return [replica for replica in range(self._replicas) if replica not in self.counted]

    def take(self) -> Partial:
        """The sum over all replicas. They stay counted until clear(), which the applied step calls."""
        return self._partials.pop(Block(0, self._replicas))

    def clear(self) -> None:
        """Forget everything."""
        self._partials.clear()
        self._digests.clear()
        self.counted.clear()

    @property
    def held_bytes(self) -> int:
        """Bytes of partial sums."""
        return sum(p.values.numel() * p.values.element_size() for p in self._partials.values() if p.values is not None)


def all_present(bucket: BucketSpec) -> Present:
    """Every slice has a gradient."""
    return (True,) * len(bucket.slices)


def none_present(bucket: BucketSpec) -> Present:
    """No slice has a gradient."""
    return (False,) * len(bucket.slices)
