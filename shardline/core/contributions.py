"""Contributions of one step to one bucket, summed along the canonical tree as soon as siblings meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from shardline.core import rows
from shardline.core.plan import BucketSpec
from shardline.core.reduce import Block, mean_, sibling, split
from shardline.core.spec import TensorKind

Present = tuple[bool, ...]


@dataclass(slots=True)
class Partial:
    """The sum over one block. values: flat, in the bucket's layout; None if no slice has a gradient."""

    values: torch.Tensor | None
    present: Present
    borrowed: bool = False
    """The memory belongs to somebody else (a worker's segment, a received message): it is read, never written."""
    bound: float = math.inf
    """Upper bound of the elements' magnitudes; infinity if unknown."""
    dim: int = 0
    """The values are packed rows of a table, of this dimension; 0 = the bucket's elements."""

    @property
    def numbers(self) -> torch.Tensor:
        """The values, without the ids beside them."""
        assert self.values is not None
        return rows.rows_of(self.values, self.dim) if self.dim else self.values

    def nbytes(self, bucket: BucketSpec) -> int:
        """Bytes of the values as they are sent uncoded; 0 without any."""
        return self.held_bytes if self.values is None or self.dim else bucket.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the values, including borrowed ones, which keep a message or a segment alive."""
        return 0 if self.values is None else self.values.nbytes


def merge(left: Partial, right: Partial, bucket: BucketSpec) -> Partial:
    """The sum left + right, in memory of one of the two that isn't borrowed, else in new memory.

    A slice absent on one side takes the other's bits, without adding zero. The bits don't depend on the memory used.
    """
    if right.values is None:
        return left
    if left.values is None:
        return right
    bound = left.bound + right.bound
    if left.dim:
        return Partial(rows.merge(left.values, right.values, left.dim), left.present, bound=bound, dim=left.dim)
    if all(left.present) and all(right.present):
        target = _target(left, right)
        out = torch.empty_like(left.values) if target is None else target
        return Partial(torch.add(left.values, right.values, out=out), left.present, bound=bound)
    either = tuple(a or b for a, b in zip(left.present, right.present, strict=True))
    return Partial(_merge_slices(left, right, bucket), either, bound=bound)


def _target(left: Partial, right: Partial) -> torch.Tensor | None:
    """Memory that the sum may overwrite."""
    return right.values if left.borrowed and not right.borrowed else None if left.borrowed else left.values


def _merge_slices(left: Partial, right: Partial, bucket: BucketSpec) -> torch.Tensor:
    """merge() for slices that are absent on one side or on both."""
    assert left.values is not None and right.values is not None
    target = _target(left, right)
    # Zeros: unwritten elements (padding, slices absent on both sides) have to be finite.
    out = torch.zeros_like(left.values) if target is None else target
    for number, piece in enumerate(bucket.slices):
        span = slice(piece.offset, piece.end)
        if left.present[number] and right.present[number]:
            torch.add(left.values[span], right.values[span], out=out[span])
        elif left.present[number] and out is not left.values:
            out[span].copy_(left.values[span])
        elif right.present[number] and out is not right.values:
            out[span].copy_(right.values[span])
    return out


def mean(total: Partial, replicas: int) -> Partial:
    """A sum over replicas divided by their number, in place if the memory isn't borrowed.

    For one replica the sum is returned unchanged.
    """
    if total.values is None or replicas == 1:
        return total
    if total.borrowed:
        if not total.dim:
            return Partial(total.values.div(replicas), total.present, bound=total.bound)
        total = replace(total, values=total.values.clone(), borrowed=False)
    mean_(total.numbers, replicas)
    return total


def scaled(total: Partial, scale: float) -> Partial:
    """A gradient times a clipping factor, in place if the memory isn't borrowed; 1 or more changes nothing."""
    if total.values is None or scale >= 1.0:
        return total
    if total.borrowed:
        if not total.dim:
            return Partial(total.values.mul(scale), total.present, bound=total.bound)
        total = replace(total, values=total.values.clone(), borrowed=False)
    total.numbers.mul_(scale)
    return total


class Contributions:
    """The counted replicas of the open step, and their partial sums. Guarded by the bucket's lock."""

    def __init__(
        self,
        bucket: BucketSpec,
        replicas: int,
        *,
        on_held: Callable[[int], None] = lambda difference: None,
        in_tree: bool = True,
    ) -> None:
        """on_held(difference in bytes) is called when held_bytes changes.

        in_tree: neighbours are added at once, for take(). False: each is kept, for take_of().
        """
        self._bucket = bucket
        self._on_held = on_held
        self._replicas = replicas
        self._in_tree = in_tree
        self._dim = dim_of(bucket)
        self._whole = Block(0, replicas)
        self._partials: dict[Block, Partial] = {}
        self._fingerprints: dict[Block, int] = {}
        self.counted: set[int] = set()
        self.mask = 0
        """Bit r is set if replica r is counted. A single number: readable without the lock."""
        self.held_bytes = 0
        """Bytes of partial sums. Readable without the lock."""

    def add(
        self,
        block: Block,
        values: torch.Tensor | None,
        present: Present,
        fingerprint: int,
        *,
        borrowed: bool = False,
        bound: float = math.inf,
    ) -> None:
        """Count a block that the rule admitted.

        The contributions take over the tensor; a borrowed one is only read, until clear() or take(). bound: as in
        Partial.
        """
        first, count = block
        self.counted.update(range(first, first + count))
        self.mask |= ((1 << count) - 1) << first
        self._fingerprints[block] = fingerprint
        partial, freed = Partial(values, present, borrowed, bound, self._dim), 0
        # Climb while the sibling is there: the order of arrival never changes the order of additions.
        while self._in_tree and (family := sibling(block, self._replicas)) is not None:
            parent, left, right = family
            other = right if block == left else left
            if other not in self._partials:
                break
            partner = self._partials.pop(other)
            freed += partner.held_bytes
            partial = merge(partial, partner, self._bucket) if block == left else merge(partner, partial, self._bucket)
            block = parent
        self._partials[block] = partial
        self._hold(partial.held_bytes - freed)

    def bits_differ(self, block: Block, fingerprint: int) -> bool:
        """Whether a repeated contribution of this block has other bits than the one that was counted."""
        known = self._fingerprints.get(block, 0)
        return bool(known and fingerprint and known != fingerprint)

    @property
    def complete(self) -> bool:
        return len(self.counted) == self._replicas

    def partials(self) -> dict[Block, Partial]:
        return dict(self._partials)

    def missing(self) -> list[int]:
        return [replica for replica in range(self._replicas) if replica not in self.counted]

    def take(self) -> Partial:
        """The sum over all replicas. They stay counted until clear(), which is called when the step is applied."""
        total = self._partials.pop(self._whole)
        self._hold(-total.held_bytes)
        return total

    def take_of(self, replicas: Sequence[int]) -> Partial:
        """The sum over these replicas, in the canonical tree of their number; the others' contributions are dropped.

        All of them stay counted until clear().
        """
        parts = [self._partials[Block(replica, 1)] for replica in replicas]
        self._partials.clear()
        total = self._sum(parts, Block(0, len(parts)))
        self._hold(-self.held_bytes)
        return total

    def _sum(self, parts: Sequence[Partial], node: Block) -> Partial:
        if node.count == 1:
            return parts[node.first]
        left, right = split(node)
        return merge(self._sum(parts, left), self._sum(parts, right), self._bucket)

    def clear(self) -> None:
        self._partials.clear()
        self._fingerprints.clear()
        self.counted.clear()
        self.mask = 0
        self._hold(-self.held_bytes)

    def _hold(self, difference: int) -> None:
        if difference:
            self.held_bytes += difference
            self._on_held(difference)


def dim_of(bucket: BucketSpec) -> int:
    """The dimension of a table's rows; 0 for any other bucket."""
    piece = bucket.slices[0]
    return piece.elements // piece.rows if bucket.kind is TensorKind.TABLE else 0


def none_present(bucket: BucketSpec) -> Present:
    """The presence mask in which no slice has a gradient."""
    return (False,) * len(bucket.slices)
