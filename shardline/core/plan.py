"""The plan: which rows of which tensor are in which bucket of which shard. Pure.

    plan = make_plan(tensors, num_shards=2)

A tensor is cut only at multiples of its quantum (about 16,384 elements of whole rows). Slices are packed into buckets
of one dtype, kind, parameter group, fragment and codec, and start at multiples of 64 elements, padded with zeros: then
element-wise rules give the same bits wherever a tensor is cut. PROTOCOL 1.1.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardline.core.places import place_of
from shardline.core.rows import PARTS
from shardline.core.spec import DTYPES, TensorKind, TensorSpec, itemsize
from shardline.core.tensor_bytes import is_stored
from shardline.errors import JobError, ProtocolError

QUANTUM_ELEMENTS = 16_384
ALIGNMENT_ELEMENTS = 64
MIN_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 4 << 20
"""Target size of a bucket: cache-sized optimizer work, and one gRPC message. A bucket costs each side about 0.1 ms
whatever its size, so large shards have large buckets, and small shards small ones to allow overlap."""
BUCKETS_WANTED = 16
"""Number of buckets per shard to aim for, within those sizes."""
SPLIT_FLOOR_BYTES = 256 << 10
"""Tensors below this are never cut (TensorFlow's MinSizePartitioner has the same floor)."""
MOST_IMAGE_BYTES = 1 << 40
"""Bytes of a table's part in a cut, at most."""
PIECE_FLOOR_BYTES = 64 << 10
"""Pieces are not cut smaller than this for balance; it is one quantum of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Rows [first_row, first_row + rows) of tensor number `tensor`, at `offset` elements of a bucket."""

    tensor: int
    first_row: int
    rows: int
    offset: int
    elements: int

    @property
    def end(self) -> int:
        """Offset of the first element after the slice, without padding."""
        return self.offset + self.elements


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """A flat part of a shard: the unit of atomicity, of transfer and of optimizer work."""

    dtype: str
    kind: TensorKind
    elements: int
    """Number of elements including padding."""
    slices: tuple[Slice, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        return self.elements * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    buckets: tuple[BucketSpec, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of one copy of the shard's values; of its tables, whose size nobody knows, next to nothing."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @functools.cached_property
    def image_bytes(self) -> int:
        """Most bytes of one bucket's image: values and at most a handful of states, each in float64."""
        if any(bucket.kind is TensorKind.TABLE for bucket in self.buckets):
            return MOST_IMAGE_BYTES
        return 64 * max((bucket.elements for bucket in self.buckets), default=0) * 8 + (1 << 20)


@dataclass(frozen=True)
class Plan:
    """Tensors and how they are cut. Equal inputs give equal plans on every machine."""

    tensors: tuple[TensorSpec, ...]
    shards: tuple[ShardSpec, ...]

    @functools.cached_property
    def plan_id(self) -> str:
        """Digest in every data message, so that differently cut tensors are never mixed."""
        form = [
            # Without fragments and codecs: they matter to the buckets alone.
            [[t.name, list(t.shape), t.dtype, t.kind.value, t.group, t.whole, list(t.aliases)] for t in self.tensors],
            [
                [
                    [b.dtype, b.kind.value, b.elements, [[s.tensor, s.first_row, s.rows, s.offset] for s in b.slices]]
                    for b in shard.buckets
                ]
                for shard in self.shards
            ],
        ]
        return hashlib.sha256(json.dumps(form, separators=(",", ":")).encode()).hexdigest()[:32]

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Tensor number by name, aliases included."""
        table = {}
        for number, tensor in enumerate(self.tensors):
            for name in (tensor.name, *tensor.aliases):
                table[name] = number
        return table

    @functools.cached_property
    def kinds(self) -> dict[TensorKind, dict[str, int | None]]:
        """For each kind of tensor `index`, with None for tensors of other kinds."""
        tensors, index = self.tensors, self.index
        return {
            kind: {name: number if tensors[number].kind is kind else None for name, number in index.items()}
            for kind in TensorKind
        }

    @functools.cached_property
    def quantum_base(self) -> tuple[int, ...]:
        """Number of the first quantum of each tensor in plan order, which is also the order for adding up norms."""
        bases, total = [], 0
        for tensor in self.tensors:
            bases.append(total)
            total += num_quanta(tensor)
        return tuple(bases)

    def pieces(self, tensor: int) -> Iterator[tuple[int, int, Slice]]:
        """(shard, bucket, slice) of every slice of a tensor, in no particular order."""
        return iter(self._slices[tensor])

    @functools.cached_property
    def _slices(self) -> Sequence[Sequence[tuple[int, int, Slice]]]:
        """For each tensor, what pieces() yields."""
        found: list[list[tuple[int, int, Slice]]] = [[] for _ in self.tensors]
        for s, shard in enumerate(self.shards):
            for b, bucket in enumerate(shard.buckets):
                for piece in bucket.slices:
                    found[piece.tensor].append((s, b, piece))
        return found

    def place(self, shard: int) -> str:
        """The place of a shard's tensors, see core.places; of a plan that was made without places, any."""
        return place_of(self.tensors[self.shards[shard].buckets[0].slices[0].tensor])


def quantum_rows(tensor: TensorSpec) -> int:
    """Number of rows between two positions where the tensor may be cut."""
    if tensor.kind is TensorKind.TABLE:
        return 1
    return max(1, -(-QUANTUM_ELEMENTS // max(1, tensor.row_elements)))


def cut_rows(tensor: TensorSpec) -> int:
    """Number of rows between two positions where make_plan cuts: whole quanta.

    Tensors whose own end is not at a multiple of 64 elements are cut only at such multiples: torch may round their last
    elements otherwise than the rest, so all other pieces must end where vectors do.
    """
    step = quantum_rows(tensor)
    if tensor.elements % ALIGNMENT_ELEMENTS == 0:
        return step
    return step * (ALIGNMENT_ELEMENTS // math.gcd(ALIGNMENT_ELEMENTS, step * tensor.row_elements))


def num_quanta(tensor: TensorSpec) -> int:
    """Number of quanta of a tensor; 0 if it has no elements."""
    if tensor.elements == 0:
        return 0
    return -(-tensor.rows // quantum_rows(tensor))


def padded(elements: int) -> int:
    return -(-elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


_Alike = tuple[str, str, int, int, str]
"""(kind, dtype, group, fragment, codec)."""


@dataclass
class _Piece:
    tensor: int
    first_row: int
    rows: int
    elements: int
    nbytes: int


def _cut(number: int, tensor: TensorSpec, target_bytes: int) -> list[_Piece]:
    """Pieces of at most about target_bytes, each a whole number of quanta."""
    size = itemsize(tensor.dtype)
    total = tensor.elements * size
    step = cut_rows(tensor)
    if tensor.whole or total < SPLIT_FLOOR_BYTES or total <= target_bytes or tensor.rows <= step:
        return [_Piece(number, 0, tensor.rows, tensor.elements, total)]
    row_bytes = tensor.row_elements * size
    rows_per_piece = max(step, target_bytes // row_bytes // step * step)
    # Even pieces, so that the last one is not tiny.
    count = -(-tensor.rows // rows_per_piece)
    even = -(-tensor.rows // count)
    rows_per_piece = -(-even // step) * step
    pieces = []
    for first in range(0, tensor.rows, rows_per_piece):
        rows = min(rows_per_piece, tensor.rows - first)
        pieces.append(_Piece(number, first, rows, rows * tensor.row_elements, rows * row_bytes))
    return pieces


def make_plan(
    tensors: Sequence[TensorSpec],
    num_shards: int,
    *,
    bucket_bytes: int | None = None,
    shares: Sequence[float] | None = None,
    places: Mapping[str, int] | None = None,
) -> Plan:
    """Cut the tensors into buckets of about bucket_bytes over num_shards shards, balanced by bytes.

    bucket_bytes: None = according to the size of a shard. shares: the part of the bytes that each shard gets, above 0,
    1 in all; None = equal parts, which a model with fewer pieces than shards gets in any case. places: instead of
    num_shards and shares, the number of shards for the tensors of each place (core.places.place_of), which come one
    after another. Every fragment is balanced by itself, because fragments are exchanged one at a time: what follows is
    said of a model in one fragment and equal parts.

    Deterministic. balance(plan) <= 1 + (1 - 1 / num_shards) * largest piece / mean shard (greedy placement: Graham,
    "Bounds on Multiprocessing Timing Anomalies", 1969), and pieces are at most 1/12 of the mean if tensors can be cut
    that finely. Hence balance <= 1.1 whenever the mean shard has at least 10 * PIECE_FLOOR_BYTES (640 KiB) and no
    single cut_rows(), whole tensor or tensor under SPLIT_FLOOR_BYTES exceeds a tenth of it. If there are fewer pieces
    than shards, the plan has fewer shards: none is empty, so nobody ever waits for one. Raises JobError for an empty
    model, a repeated name, an unknown dtype or num_shards < 1.
    """
    if num_shards < 1:
        raise JobError(f"the cluster has {num_shards} parameter servers; it needs at least 1")
    if not any(tensor.kind in (TensorKind.PARAM, TensorKind.TABLE) for tensor in tensors):
        raise JobError("the model has no parameters that require a gradient, so there is nothing to train")
    seen: dict[str, str] = {}
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise JobError(f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which Shardline doesn't support")
        for name in (tensor.name, *tensor.aliases):
            if name in seen:
                raise JobError(f"two tensors are named {name!r} ({seen[name]} and {tensor.name}); names must be unique")
            seen[name] = tensor.name

    if places:
        shards: list[ShardSpec] = []
        for place, count in places.items():
            here = [number for number, tensor in enumerate(tensors) if place_of(tensor) == place]
            shards += _shards(tensors, here, count, bucket_bytes, None)
        return Plan(tuple(tensors), tuple(shards))
    return Plan(tuple(tensors), tuple(_shards(tensors, range(len(tensors)), num_shards, bucket_bytes, shares)))


def _shards(
    tensors: Sequence[TensorSpec],
    numbers: Sequence[int],
    num_shards: int,
    bucket_bytes: int | None,
    shares: Sequence[float] | None,
) -> list[ShardSpec]:
    """At most num_shards shards with the tensors of these numbers."""
    # Pieces small enough for balanced greedy placement: at most a bucket, and, where there are several shards, at most
    # 1/12 of a shard's fair share of a fragment (without the padding, 1/10 would be enough for a balance of 1.1).
    dense = [number for number in numbers if tensors[number].kind is not TensorKind.TABLE]
    total = sum(tensors[number].elements * itemsize(tensors[number].dtype) for number in dense)
    if bucket_bytes is None:
        bucket_bytes = min(max(total // (BUCKETS_WANTED * num_shards), MIN_BUCKET_BYTES), BUCKET_BYTES)
    fragments = len({tensors[number].fragment for number in dense}) or 1
    finest = total // (12 * num_shards * fragments) if num_shards > 1 else bucket_bytes
    if shares is not None:
        finest = int(min(shares) * total) // (12 * fragments)
    target = max(PIECE_FLOOR_BYTES, min(bucket_bytes, finest))
    pieces = [piece for number in dense for piece in _cut(number, tensors[number], target)]

    placed = _place(pieces, tensors, shares or [1] * num_shards)
    if shares is not None and not all(placed):
        return _shards(tensors, numbers, num_shards, bucket_bytes, None)
    shards = []
    for held, tables in zip(placed, _table_buckets(tensors, numbers, shares or [1] * num_shards), strict=True):
        held.sort(key=lambda p: (p.tensor, p.first_row))
        if held or tables:
            shards.append(ShardSpec(buckets=(*_pack(held, tensors, bucket_bytes), *tables)))
    return shards


def _table_buckets(
    tensors: Sequence[TensorSpec], numbers: Sequence[int], shares: Sequence[float]
) -> list[list[BucketSpec]]:
    """For each shard a bucket of each table: a range of its parts, as long as the shard's share."""
    ends = [round(PARTS * end / sum(shares)) for end in itertools.accumulate(shares)]
    found: list[list[BucketSpec]] = [[] for _ in shares]
    for number in numbers:
        tensor = tensors[number]
        for held, first, end in zip(found, [0, *ends], ends, strict=False) if tensor.kind is TensorKind.TABLE else ():
            if end > first:
                elements = (end - first) * tensor.row_elements
                piece = Slice(tensor=number, first_row=first, rows=end - first, offset=0, elements=elements)
                spec = BucketSpec(dtype=tensor.dtype, kind=tensor.kind, elements=padded(elements), slices=(piece,))
                held.append(spec)
    return found


def _place(pieces: Sequence[_Piece], tensors: Sequence[TensorSpec], shares: Sequence[float]) -> list[list[_Piece]]:
    """The pieces of each shard: largest first onto the one that has the least of its fragment, then the least of all.

    The least for its share.

    Ties by plan order, so the result is a function of the inputs alone. Equally large pieces of a tensor then change
    places, so that neighbours are on one shard, where they become one slice.
    """
    parts = {tensor.fragment: [0.0] * len(shares) for tensor in tensors}
    loads = [0.0] * len(shares)
    placed: list[list[_Piece]] = [[] for _ in shares]
    ordered = sorted(pieces, key=lambda p: (-p.nbytes, p.tensor, p.first_row))
    for (_, number), group in itertools.groupby(ordered, key=lambda p: (p.nbytes, p.tensor)):
        part, size = parts[tensors[number].fragment], itemsize(tensors[number].dtype)
        alike, chosen = list(group), []
        for piece in alike:
            _, _, shard = min(zip(part, loads, range(len(shares)), strict=True))
            part[shard] += padded(piece.elements) * size / shares[shard]
            loads[shard] += padded(piece.elements) * size / shares[shard]
            chosen.append(shard)
        for piece, shard in zip(alike, sorted(chosen), strict=True):
            placed[shard].append(piece)
    return placed


def _pack(held: Sequence[_Piece], tensors: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[BucketSpec]:
    """Buckets of one shard: pieces that are _Alike, in tensor order, so the first layers come first."""
    open_: dict[_Alike, list[Slice]] = {}
    sizes: dict[_Alike, int] = {}
    done: list[tuple[int, BucketSpec]] = []

    def close(key: _Alike) -> None:
        slices = open_.pop(key, [])
        if slices:
            kind, dtype, *_ = key
            spec = BucketSpec(dtype=dtype, kind=TensorKind(kind), elements=sizes[key], slices=tuple(slices))
            done.append((slices[0].tensor, spec))
        sizes[key] = 0

    for piece in held:
        tensor = tensors[piece.tensor]
        key = (tensor.kind.value, tensor.dtype, tensor.group, tensor.fragment, tensor.codec)
        room = padded(piece.elements)
        if open_.get(key) and (sizes[key] + room) * itemsize(tensor.dtype) > bucket_bytes:
            close(key)
        slices = open_.setdefault(key, [])
        last = slices[-1] if slices else None
        if last and (last.tensor, last.first_row + last.rows) == (piece.tensor, piece.first_row):
            # One slice: each costs the workers and the server time.
            slices[-1] = replace(last, rows=last.rows + piece.rows, elements=last.elements + piece.elements)
        else:
            slices.append(
                Slice(
                    tensor=piece.tensor,
                    first_row=piece.first_row,
                    rows=piece.rows,
                    offset=sizes.get(key, 0),
                    elements=piece.elements,
                )
            )
        sizes[key] = padded(slices[-1].end)
    for key in list(open_):
        close(key)
    return iter([spec for _, spec in sorted(done, key=lambda item: item[0])])


def check_plan(plan: Plan) -> None:
    """Raise ProtocolError unless a received plan has every element exactly once, cut as make_plan does.

    Checked: names and dtypes; slices in order, aligned, within their bucket and tensor, cut at quanta only; buckets of
    one dtype, kind, group, fragment and codec, as large as their slices; no empty shard; every row of every tensor in
    exactly one slice.
    """
    seen: set[str] = set()
    for tensor in plan.tensors:
        if tensor.dtype not in DTYPES:
            raise ProtocolError(
                f"plan: tensor {tensor.name!r} has dtype {tensor.dtype!r}, which Shardline doesn't support"
            )
        if any(size < 0 for size in tensor.shape):
            raise ProtocolError(f"plan: tensor {tensor.name!r} has the negative shape {tensor.shape}")
        for name in (tensor.name, *tensor.aliases):
            if name in seen:
                raise ProtocolError(f"plan: two tensors are named {name!r}")
            seen.add(name)
    covered: list[list[tuple[int, int]]] = [[] for _ in plan.tensors]
    for s, shard in enumerate(plan.shards):
        if not shard.buckets:
            raise ProtocolError(f"plan: shard {s} of {len(plan.shards)} is empty; a plan has no empty shard")
        for b, bucket in enumerate(shard.buckets):
            _check_bucket(plan.tensors, bucket, f"plan: shard {s}, bucket {b}")
            for piece in bucket.slices:
                covered[piece.tensor].append((piece.first_row, piece.rows))
    for tensor, pieces in zip(plan.tensors, covered, strict=True):
        if tensor.whole and len(pieces) > 1:
            raise ProtocolError(
                f"plan: {tensor.name!r} must not be cut, but the plan cuts it into {len(pieces)} slices"
            )
        row = 0
        for first, rows in sorted(pieces):
            if first != row:
                raise ProtocolError(f"plan: rows {row} to {first} of {tensor.name!r} are missing or repeated")
            row = first + rows
        if row != tensor.rows or not pieces:
            raise ProtocolError(f"plan: {tensor.name!r} has {tensor.rows} rows; the plan covers {row}")
        if tensor.rows == 0 and len(pieces) > 1:
            raise ProtocolError(f"plan: {tensor.name!r} has no rows, but is in the plan {len(pieces)} times")


def _check_bucket(tensors: Sequence[TensorSpec], bucket: BucketSpec, where: str) -> None:
    end = 0
    first: TensorSpec | None = None
    if not bucket.slices:
        raise ProtocolError(f"{where} contains no tensor")
    for piece in bucket.slices:
        if not 0 <= piece.tensor < len(tensors):
            raise ProtocolError(f"{where} refers to tensor {piece.tensor}, but there are {len(tensors)}")
        tensor = tensors[piece.tensor]
        if tensor.dtype != bucket.dtype or tensor.kind is not bucket.kind:
            raise ProtocolError(
                f"{where} mixes {tensor.name!r} ({tensor.dtype}, {tensor.kind.value}) into a bucket of"
                f" {bucket.dtype}, {bucket.kind.value}"
            )
        first = first or tensor
        if tensor.group != first.group:
            raise ProtocolError(f"{where} mixes {tensor.name!r} of group {tensor.group} into group {first.group}")
        if tensor.fragment != first.fragment:
            raise ProtocolError(
                f"{where} mixes {tensor.name!r} of fragment {tensor.fragment} into fragment {first.fragment}"
            )
        if tensor.codec != first.codec:
            raise ProtocolError(f"{where} mixes {tensor.name!r} of codec {tensor.codec!r} into codec {first.codec!r}")
        if piece.offset % ALIGNMENT_ELEMENTS or piece.offset < end or piece.end > bucket.elements:
            raise ProtocolError(
                f"{where}: slice of {tensor.name!r} at elements {piece.offset} to {piece.end} of {bucket.elements}"
                " overlaps another, is not aligned, or exceeds the bucket"
            )
        last = piece.first_row + piece.rows
        if piece.first_row < 0 or piece.rows < min(1, tensor.rows) or last > tensor.rows:
            raise ProtocolError(f"{where}: rows {piece.first_row} to {last} of {tensor.name!r} are out of range")
        if piece.elements != piece.rows * tensor.row_elements:
            raise ProtocolError(f"{where}: {piece.rows} rows of {tensor.name!r} don't have {piece.elements} elements")
        step = quantum_rows(tensor)
        if piece.first_row % step or (last % step and last != tensor.rows):
            raise ProtocolError(
                f"{where}: {tensor.name!r} is cut at rows {piece.first_row} to {last}, not at multiples of {step}"
            )
        end = piece.end
    if bucket.elements != padded(end):
        raise ProtocolError(f"{where} has {bucket.elements} elements; its slices take {padded(end)}")


def balance(plan: Plan) -> float:
    """Max shard bytes / mean shard bytes; 1.0 is even."""
    sizes = [shard.nbytes for shard in plan.shards]
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0


# Where a bucket's slices are in the tensors that they are of


def span_of(plan: Plan, piece: Slice) -> slice:
    """The range of a slice within its flattened tensor."""
    start = piece.first_row * plan.tensors[piece.tensor].row_elements
    return slice(start, start + piece.elements)


def tensor_piece(plan: Plan, bucket: BucketSpec, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The slice of one tensor that is the whole bucket, flat, not copied; None if there is none."""
    piece = bucket.slices[0]
    if len(bucket.slices) != 1 or piece.offset or piece.elements != bucket.elements:
        return None
    tensor = tensors.get(piece.tensor)
    if tensor is None or not is_stored(tensor):
        return None
    return tensor.detach().reshape(-1)[span_of(plan, piece)]
