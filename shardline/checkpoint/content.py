"""Content of a shard's file: entries keyed by tensor name and first row, their digest, and the bytes of the file.

    value/<tensor>@<row>          rows of the tensor, in its shape
    state/<state>/<tensor>@<row>  optimizer state: in the tensor's shape if it is element-wise, else flat
    scalar/<state>/<tensor>@<row> float64, 0-d: per-tensor state such as "step"
    initialized/<tensor>@<row>    bool, 0-d: the optimizer state of these rows exists

Of a table, the number after "@" is that of a part, and the rows are those of a range of parts, by part and id:

    state/ids/<table>@<part>      int64 [n]
    value/<table>@<part>          [n, dim]
    state/<state>/<table>@<part>  [n, width]
    state/filter/<table>@<part>   uint8 [parts, counters], if the table's admission counts

No key or value depends on offsets, buckets or the number of shards, so any plan can read them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import BucketSpec, Plan, Slice, quantum_rows
from shardline.core.rows import part_of
from shardline.core.spec import DTYPE_NAMES, DTYPES, RuleSpec, TensorKind, TensorSpec
from shardline.errors import CheckpointError
from shardline.storage.table import FILTER, IDS, check_image, row_widths
from shardline.update import chosen

STATE = "state"
SCALAR = "scalar"
INITIALIZED = "initialized"
MAX_DIGITS = 18
"""Most digits of a row number."""
COMPLEX_KEYS = "complex"
"""Metadata field of a shard's file: JSON list of the keys whose last dimension is (real, imaginary)."""

_CODES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes in a safetensors header."""


def stored_dtype(name: str) -> str:
    """Name of a dtype in a file: as in a safetensors header; for complex ones "complex " and the name of the parts."""
    dtype = DTYPES[name]
    return f"complex {_CODES[dtype.to_real()]}" if dtype.is_complex else _CODES[dtype]


@dataclass(frozen=True, order=True)
class Key:
    """Name of an entry: what it is ("value", "state", "scalar", "initialized"), the state, the tensor and its row."""

    what: str
    state: str
    tensor: str
    first_row: int

    def __str__(self) -> str:
        middle = f"{self.state}/" if self.what in (STATE, SCALAR) else ""
        return f"{self.what}/{middle}{self.tensor}@{self.first_row}"

    @classmethod
    def parse(cls, text: str) -> Key:
        """Inverse of str(); tensor names may contain "/" and "@". Raises CheckpointError for anything else."""
        what, _, rest = text.partition("/")
        state = ""
        if what in (STATE, SCALAR):
            state, _, rest = rest.partition("/")
        tensor, at, row = rest.rpartition("@")
        known = what in (VALUE, STATE, SCALAR, INITIALIZED)
        if not known or not at or not (row.isascii() and row.isdigit() and len(row) <= MAX_DIGITS):
            raise CheckpointError(f"entry {text!r} is not value/, state/, scalar/ or initialized/<tensor>@<row>")
        if what in (STATE, SCALAR) and not state:
            raise CheckpointError(f"entry {text!r} does not name a state")
        return cls(what, state, tensor, int(row))


Entries = dict[Key, torch.Tensor]


def image_entries(image: BucketImage, bucket: BucketSpec, tensors: Sequence[TensorSpec], rule: RuleSpec) -> Entries:
    """Entries of one bucket, as views of the image's tensors. Raises CheckpointError if the image doesn't fit."""
    where = f"shard {image.shard}, bucket {image.bucket}"
    if bucket.kind is TensorKind.TABLE:
        return _table_entries(image, bucket.slices[0], tensors[bucket.slices[0].tensor])
    _check_image(image, bucket, where)
    entries: Entries = {}
    method = chosen(rule)
    for name, flat in image.tensors.items():
        layout = method.state_spans(rule, name, bucket, tensors)
        total = method.flat_elements(rule, name, bucket, tensors)
        if flat.dim() != 1 or flat.numel() != total or flat.device.type != "cpu":
            raise CheckpointError(
                f"{where}: {name!r} has shape {tuple(flat.shape)} on {flat.device}; the plan requires {total} on the "
                "CPU"
            )
        if flat.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{where}: {name!r} has dtype {flat.dtype}, which a checkpoint can't store")
        for piece, (offset, elements) in zip(bucket.slices, layout, strict=True):
            tensor = tensors[piece.tensor]
            key = Key(VALUE if name == VALUE else STATE, "" if name == VALUE else name, tensor.name, piece.first_row)
            part = flat[offset : offset + elements]
            if elements == piece.elements:
                # Shape of a slice's rows; () for a 0-d tensor.
                entries[key] = part.view((piece.rows, *tensor.shape[1:]) if tensor.shape else ())
            elif elements:
                entries[key] = part
    for number, piece in enumerate(bucket.slices):
        name, row = tensors[piece.tensor].name, piece.first_row
        for state, values in image.scalars.items():
            entries[Key(SCALAR, state, name, row)] = torch.tensor(values[number], dtype=torch.float64)
        if image.initialized:
            entries[Key(INITIALIZED, "", name, row)] = torch.tensor(image.initialized[number])
    return entries


def _table_entries(image: BucketImage, piece: Slice, table: TensorSpec) -> Entries:
    check_image(image, table, piece)
    ids = image.tensors[IDS]
    entries = {Key(STATE, IDS, table.name, piece.first_row): ids}
    for name, width in row_widths(table).items():
        key = Key(VALUE if name == VALUE else STATE, "" if name == VALUE else name, table.name, piece.first_row)
        entries[key] = image.tensors[name].view(len(ids), width)
    if FILTER in image.tensors:
        entries[Key(STATE, FILTER, table.name, piece.first_row)] = image.tensors[FILTER].view(piece.rows, -1)
    return entries


def _check_image(image: BucketImage, bucket: BucketSpec, where: str) -> None:
    if VALUE not in image.tensors:
        raise CheckpointError(f"{where}: the image has no {VALUE!r}")
    dtype = image.tensors[VALUE].dtype
    if dtype is not DTYPES[bucket.dtype]:
        raise CheckpointError(f"{where}: the values are {dtype}; the plan says {bucket.dtype}")
    for state in (*image.tensors, *image.scalars):
        if not state or "/" in state:
            raise CheckpointError(f"{where}: a state is named {state!r}; a name can't be empty or contain '/'")
    for state, values in image.scalars.items():
        if len(values) != len(bucket.slices):
            raise CheckpointError(f"{where}: {len(values)} values of {state!r} for {len(bucket.slices)} slices")
    # Flags are sent as whole bytes, so False ones may follow the last slice's.
    if image.initialized and (
        len(image.initialized) < len(bucket.slices) or any(image.initialized[len(bucket.slices) :])
    ):
        raise CheckpointError(f"{where}: {len(image.initialized)} initialized flags for {len(bucket.slices)} slices")


def shard_entries(images: Sequence[BucketImage], plan: Plan, shard: int, rule: RuleSpec) -> Entries:
    """Entries of all buckets of a shard. Raises CheckpointError for a missing, repeated or foreign bucket."""
    buckets = plan.shards[shard].buckets
    entries: Entries = {}
    seen: set[int] = set()
    for image in images:
        if image.shard != shard or image.bucket in seen or not 0 <= image.bucket < len(buckets):
            raise CheckpointError(
                f"shard {shard} of the cut contains bucket {image.bucket} of shard {image.shard} ({len(seen)} of "
                f"{len(buckets)} buckets so far); each bucket must appear once"
            )
        seen.add(image.bucket)
        entries.update(image_entries(image, buckets[image.bucket], plan.tensors, rule))
    missing = sorted(set(range(len(buckets))) - seen)
    if missing:
        raise CheckpointError(f"buckets {missing[:10]} of {len(buckets)} are missing from shard {shard} of the cut")
    return entries


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a CPU tensor in memory order, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class ContentDigest:
    """SHA-256 over all content, independent of the plan: by tensor, state and quantum, sorted, with names and dtypes.

    Tensors are cut only at multiples of their quantum, so hashing each quantum gives every plan the same digest, with
    only one shard in memory at a time.
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._parts: dict[tuple[str, str, str, int], bytes] = {}

    def add(self, entries: Mapping[Key, torch.Tensor], rows: Mapping[tuple[str, int], int]) -> None:
        """Add entries. rows: number of rows by (tensor, first row)."""
        for key, part in entries.items():
            tensor = self._tensors[key.tensor]
            if tensor.kind is TensorKind.TABLE:
                ids = entries[Key(STATE, IDS, key.tensor, key.first_row)]
                numbers = key.first_row + torch.arange(len(part)) if key.state == FILTER else part_of(ids)
                for number, data in self._parts_of_table(numbers, part):
                    self._parts[key.what, key.state, key.tensor, number] = data
                continue
            held = rows[key.tensor, key.first_row]
            step = quantum_rows(tensor)
            if key.first_row % step:
                raise CheckpointError(f"{key.tensor!r} is cut at row {key.first_row}, not a multiple of {step}")
            first = key.first_row // step
            for number, data in enumerate(self._quanta(key, tensor, part, held, step)):
                self._parts[key.what, key.state, key.tensor, first + number] = data

    @staticmethod
    def _parts_of_table(parts: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[int, bytes]]:
        """(part, digest) of each part of a table that has rows. parts: that of each row, ascending."""
        head = DTYPE_NAMES[rows.dtype].encode()
        numbers, counts = torch.unique_consecutive(parts, return_counts=True)
        end = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            begin, end = end, end + count
            yield number, hashlib.sha256(head + raw_bytes(rows[begin:end])).digest()

    @staticmethod
    def _quanta(key: Key, tensor: TensorSpec, part: torch.Tensor, rows: int, step: int) -> Iterator[bytes]:
        """Digest of each quantum among an entry's rows, or of the whole entry if it isn't laid out by rows."""
        starts = range(0, max(1, rows), step)
        if key.what in (SCALAR, INITIALIZED):
            yield from (struct.pack("<d", float(part)) for _ in starts)
            return
        head = DTYPE_NAMES[part.dtype].encode()
        if not tensor.shape or tuple(part.shape) != (rows, *tensor.shape[1:]):
            yield hashlib.sha256(head + raw_bytes(part)).digest()
            return
        for row in starts:
            yield hashlib.sha256(head + raw_bytes(part[row : row + step])).digest()

    def hexdigest(self) -> str:
        """Digest of everything added, independent of the order."""
        total = hashlib.sha256()
        for key in sorted(self._parts):
            total.update("\0".join(map(str, key)).encode() + b"\0")
            total.update(self._parts[key])
        return total.hexdigest()


def safetensors_chunks(entries: Mapping[Key, torch.Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file of the entries, in pieces, without a copy of the shard.

    The library's own writer copies the whole file in memory, can't fsync, and hides the errno of a full disk.
    Format: https://github.com/huggingface/safetensors#format, read back with the library itself.
    """
    stored = {str(key): torch.view_as_real(t) if t.is_complex() else t for key, t in entries.items()}
    # Widest elements first, so that each tensor starts at a multiple of its element size.
    order = sorted(stored, key=lambda name: (-stored[name].element_size(), name))
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            COMPLEX_KEYS: json.dumps(sorted(str(key) for key, t in entries.items() if t.is_complex())),
        }
    }
    end = 0
    for name in order:
        tensor = stored[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield raw_bytes(stored[name])


def slice_rows(plan: Plan, shard: int) -> dict[tuple[str, int], int]:
    """Number of rows, by (tensor, first row), of a shard's slices."""
    return {
        (plan.tensors[piece.tensor].name, piece.first_row): piece.rows
        for bucket in plan.shards[shard].buckets
        for piece in bucket.slices
    }
