"""What the files of a checkpoint hold of its tensors, by rows; also of the same tensors in other parts."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from shardline.checkpoint.content import INITIALIZED, SCALAR, STATE
from shardline.core.image import VALUE, BucketImage
from shardline.core.plan import BucketSpec, Plan, Slice
from shardline.core.spec import DTYPES, RuleSpec, TensorSpec, joined, span_of_part
from shardline.errors import CheckpointError
from shardline.update import chosen


class Readable(Protocol):
    """Rows [first_row, first_row + rows) of what a checkpoint holds of a tensor."""

    @property
    def first_row(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def key(self) -> str: ...

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of these, as a tensor of its own."""


Index = Mapping[str, Mapping[tuple[str, str], Sequence[Readable]]]
"""Entries in ascending order, by tensor and (what, state). The values' have all rows; others begin where one of these
does."""


@dataclass
class StoredFile:
    """A shard's file, memory-mapped; the mapping survives deletion of the file."""

    path: Path
    handle: Any
    keys: list[str]
    complex_keys: frozenset[str]


@dataclass(frozen=True, order=True)
class StoredRows:
    """Rows [first_row, first_row + rows) of an entry in a file."""

    first_row: int
    rows: int
    shape: tuple[int, ...] = field(compare=False)
    dtype: str = field(compare=False)
    """As named in safetensors; for complex ones "complex " and the name of the parts."""
    file: StoredFile = field(compare=False)
    key: str = field(compare=False)

    def mapped(self) -> torch.Tensor:
        """All of it, in the file's memory, which must not be written to."""
        stored: torch.Tensor = self.file.handle.get_tensor(self.key)
        return stored

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        try:
            if start == 0 and (stop is None or stop == self.rows):
                stored = self.file.handle.get_tensor(self.key)
            else:
                stored = self.file.handle.get_slice(self.key)[start:stop]
            copy: torch.Tensor = stored.clone()
            return torch.view_as_complex(copy) if self.key in self.file.complex_keys else copy
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.file.path}: {self.key!r} can't be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Recut:
    """All rows of a tensor, of its values or of a state, put together from entries of other cuts of it."""

    contents: StoredTensors
    what: str
    target: TensorSpec
    sources: Sequence[TensorSpec]
    """The whole tensor, or all parts of it."""
    first_row: int = 0

    @property
    def rows(self) -> int:
        return self.target.rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.target.shape

    @property
    def key(self) -> str:
        return f"{self.what} of {self.target.name}"

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.rows if stop is None else stop
        if not self.target.parts:
            return self._whole(start, stop)
        first, length = span_of_part(self.target)
        if self.target.part_dim == 0:
            return self._whole(first + start, first + stop)
        return self._whole(start, stop).narrow(self.target.part_dim, first, length)

    def _whole(self, start: int, stop: int) -> torch.Tensor:
        first = self.sources[0]
        if not first.parts:
            return self._stored(first, start, stop)
        if first.part_dim:
            return torch.cat([self._stored(part, start, stop) for part in self.sources], first.part_dim)
        found = []
        for number, part in enumerate(self.sources):
            begin = number * part.rows
            low, high = max(start, begin), min(stop, begin + part.rows)
            if low < high or (low == high == start):
                found.append(self._stored(part, low - begin, high - begin))
        return torch.cat(found)

    def _stored(self, spec: TensorSpec, start: int, stop: int) -> torch.Tensor:
        entries = self.contents.entries(self.what, spec.name)
        if entries:
            if not by_rows(spec, entries[0]):
                raise CheckpointError(
                    f"state {self.what!r} of {spec.name!r} has no rows, so it can't be cut for {self.target.name!r}"
                )
            return self.contents.gather(spec, entries, start, stop - start, gaps=self.what != VALUE)
        # Another part has this state: this one's has not begun.
        other = next(found for one in self.sources if (found := self.contents.entries(self.what, one.name)))
        return torch.zeros((stop - start, *spec.shape[1:]), dtype=other[0].read(0, 0).dtype)


@dataclass(frozen=True)
class _Number:
    """A number that holds for a whole tensor."""

    value: float
    key: str = "a number"
    first_row: int = 0
    rows: int = 1
    shape: tuple[int, ...] = ()

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return torch.tensor(self.value, dtype=torch.float64)


def by_rows(tensor: TensorSpec, entry: Readable) -> bool:
    """Whether an entry has the shape of rows of its tensor."""
    if not tensor.shape:
        return entry.shape == ()
    return len(entry.shape) == len(tensor.shape) and entry.shape[1:] == tensor.shape[1:]


def _first_row(entry: Readable) -> int:
    return entry.first_row


def _last_from(entries: Sequence[Readable], row: int) -> int:
    """Number of the last entry that begins at or before a row, or else of the first one."""
    return max(0, bisect.bisect_right(entries, row, key=_first_row) - 1)


def _beginning(entries: Sequence[Readable], first: int, end: int) -> Sequence[Readable]:
    return entries[
        bisect.bisect_left(entries, first, key=_first_row) : bisect.bisect_left(entries, end, key=_first_row)
    ]


class StoredTensors:
    """Values and optimizer state of tensors in a checkpoint's files.

    where: the checkpoint, for messages. rule: that of its job. index: checked to hold all rows of the tensors' values.
    """

    def __init__(self, where: Path, rule: RuleSpec, tensors: Sequence[TensorSpec], index: Index) -> None:
        self._where = where
        self._rule = rule
        self.tensors = tensors
        self.index = index
        self._specs = {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}

    def spec(self, name: str) -> TensorSpec:
        """A tensor by name or alias. Raises CheckpointError if it is unknown."""
        found = self._specs.get(name)
        if found is None:
            raise CheckpointError(f"{self._where} has no tensor {name!r}; it has {len(self.tensors)} others")
        return found

    def recut(self, tensors: Sequence[TensorSpec]) -> StoredTensors:
        """The same for these tensors, which may be parts of these ones, or whole where these are parts.

        Raises CheckpointError, naming the tensor, if they are others, or have other shapes or dtypes.
        """
        ours = {tensor.name: tensor for tensor in self.tensors}
        sources: dict[str, list[TensorSpec]] = {}
        for tensor in self.tensors:
            sources.setdefault(tensor.part_of or tensor.name, []).append(tensor)
        wholes = {tensor.name: tensor for tensor in joined(self.tensors)}
        wanted = {tensor.name: tensor for tensor in joined(tensors)}
        index: dict[str, Mapping[tuple[str, str], Sequence[Readable]]] = {}
        other = False
        for tensor in tensors:
            name = tensor.part_of or tensor.name
            self._check_same(wholes.get(name), wanted[name])
            kept = ours.get(tensor.name)
            if kept is not None and (kept.shape, kept.part_dim) == (tensor.shape, tensor.part_dim):
                index[tensor.name] = self.index[tensor.name]
                continue
            other = True
            index[tensor.name] = self._recut(tensor, sources[name])
        if not other:
            return self
        return StoredTensors(self._where, self._rule, tensors, index)

    def _check_same(self, ours: TensorSpec | None, theirs: TensorSpec) -> None:
        if ours is None:
            self.spec(theirs.name)
            return
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            raise CheckpointError(
                f"{self._where}: {theirs.name!r} is {ours.dtype} {ours.shape} here, {theirs.dtype} {theirs.shape} in "
                "the plan"
            )

    def _recut(self, target: TensorSpec, sources: Sequence[TensorSpec]) -> Mapping[tuple[str, str], Sequence[Readable]]:
        """Entries of a tensor that is stored in other cuts."""
        kinds = {kind for source in sources for kind in self.index[source.name]}
        flags = [bool(entry.read()) for source in sources for entry in self._of(INITIALIZED, "", source)]
        found: dict[tuple[str, str], Sequence[Readable]] = {}
        for what, state in kinds:
            entry: Readable
            if what in (VALUE, STATE):
                entry = _Recut(contents=self, what=state or VALUE, target=target, sources=sources)
            elif what == INITIALIZED:
                entry = _Number(float(any(flags)))
            else:
                # The first part that has begun says it for all.
                whole = [Slice(tensor=0, first_row=0, rows=one.rows, offset=0, elements=0) for one in sources]
                begun = [
                    self._scalar(one, piece, state)
                    for one, piece in zip(sources, whole, strict=True)
                    if not flags or self._flag(one, piece)
                ]
                entry = _Number(begun[0] if begun else 0.0)
            found[what, state] = [entry]
        return found

    def _of(self, what: str, state: str, tensor: TensorSpec) -> Sequence[Readable]:
        return self.index[tensor.name].get((what, state), ())

    def read_slice(self, name: str, first_row: int, rows: int, what: str = VALUE) -> torch.Tensor:
        spec = self.spec(name)
        if not 0 <= first_row <= first_row + rows <= spec.rows:
            raise CheckpointError(
                f"{self._where}: {name!r} has {spec.rows} rows; rows {first_row} to {first_row + rows}"
            )
        entries = self.entries(what, spec.name)
        if not entries:
            raise CheckpointError(
                f"{self._where}: {name!r} has no state {what!r}; it has {self.states(name) or 'none'}"
            )
        if by_rows(spec, entries[0]):
            return self.gather(spec, entries, first_row, rows, gaps=False)
        if rows != spec.rows:
            raise CheckpointError(f"{self._where}: state {what!r} of {name!r} has no rows; read it whole")
        return entries[0].read()

    def states(self, name: str) -> list[str]:
        tensor = self.spec(name).name
        return sorted(state for what, state in self.index[tensor] if what == STATE)

    def scalars(self, name: str) -> dict[str, float]:
        tensor = self.spec(name).name
        return {
            state: float(entries[0].read()) for (what, state), entries in self.index[tensor].items() if what == SCALAR
        }

    def entries(self, what: str, tensor: str) -> Sequence[Readable]:
        """Entries of a tensor's values, or of a state of it, by row."""
        return self.index[tensor].get((VALUE, "") if what == VALUE else (STATE, what), ())

    def gather(
        self, spec: TensorSpec, entries: Sequence[Readable], first_row: int, rows: int, *, gaps: bool
    ) -> torch.Tensor:
        """Rows from all entries that contain them; zeros for missing rows, if gaps are allowed."""
        if not spec.shape:
            return entries[0].read()
        parts = []
        row, end = first_row, first_row + rows
        for entry in _beginning(entries, entries[_last_from(entries, row)].first_row, end):
            low, high = max(row, entry.first_row), min(end, entry.first_row + entry.rows)
            if low >= high:
                continue
            if low > row:
                parts.append(self._gap(spec, entries, row, low, gaps))
            parts.append(entry.read(low - entry.first_row, high - entry.first_row))
            row = high
        if row < end or not parts:
            parts.append(self._gap(spec, entries, row, end, gaps))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gap(self, spec: TensorSpec, entries: Sequence[Readable], low: int, high: int, gaps: bool) -> torch.Tensor:
        if high > low and not gaps:
            raise CheckpointError(f"{self._where}: {entries[0].key!r} and related entries lack rows {low} to {high}")
        example = entries[0].read(0, 0) if entries[0].rows else entries[0].read()
        return torch.zeros((high - low, *spec.shape[1:]), dtype=example.dtype)

    def image(self, plan: Plan, bucket: BucketSpec, head: BucketImage) -> BucketImage:
        """`head` filled with the bucket's content."""
        specs = [self.spec(plan.tensors[piece.tensor].name) for piece in bucket.slices]
        values = torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype])
        for piece, spec in zip(bucket.slices, specs, strict=True):
            values[piece.offset : piece.end] = self.read_slice(spec.name, piece.first_row, piece.rows).reshape(-1)
        held = {kind for spec in specs for kind in self.index[spec.name]}
        tensors = {VALUE: values}
        for state in sorted(state for what, state in held if what == STATE):
            tensors[state] = self._state(plan, bucket, specs, state)
        flags = [self._flag(spec, piece) for spec, piece in zip(specs, bucket.slices, strict=True)]
        scalars = {
            state: tuple(self._scalar(spec, piece, state) for spec, piece in zip(specs, bucket.slices, strict=True))
            for state in sorted(state for what, state in held if what == SCALAR)
        }
        return dataclasses.replace(
            head,
            tensors=tensors,
            scalars=scalars,
            initialized=() if all(flag is None for flag in flags) else tuple(bool(flag) for flag in flags),
        )

    def _state(self, plan: Plan, bucket: BucketSpec, specs: list[TensorSpec], state: str) -> torch.Tensor:
        """A state's flat tensor; zeros for padding and for tensors without that state."""
        rule, method = self._rule, chosen(self._rule)
        spans = method.state_spans(rule, state, bucket, plan.tensors)
        total = method.flat_elements(rule, state, bucket, plan.tensors)
        flat: torch.Tensor | None = None
        for piece, spec, (offset, elements) in zip(bucket.slices, specs, spans, strict=True):
            entries = self.entries(state, spec.name)
            if not entries:
                continue
            if by_rows(spec, entries[0]):
                part = self.gather(spec, entries, piece.first_row, piece.rows, gaps=True)
            else:
                part = entries[0].read()
            if part.numel() != elements:
                raise CheckpointError(
                    f"{self._where}: state {state!r} of {spec.name!r} has {part.numel()} elements; update rule "
                    f"{rule.label} needs {elements}"
                )
            if flat is None:
                flat = torch.zeros(total, dtype=part.dtype)
            flat[offset : offset + elements] = part.reshape(-1)
        assert flat is not None
        return flat

    def _touching(self, spec: TensorSpec, piece: Slice, what: str, state: str = "") -> Sequence[Readable]:
        """Flags or numbers of the slices, as they are stored, that contain rows of the piece."""
        values = self.entries(VALUE, spec.name)
        first = values[_last_from(values, piece.first_row)].first_row
        return _beginning(self._of(what, state, spec), first, piece.first_row + max(1, piece.rows))

    def _flag(self, spec: TensorSpec, piece: Slice) -> bool | None:
        touching = self._touching(spec, piece, INITIALIZED)
        return any(bool(entry.read()) for entry in touching) if touching else None

    def _scalar(self, spec: TensorSpec, piece: Slice, state: str) -> float:
        """The scalar of a piece's rows. If shards were cut one by one, that of the first initialized slice."""
        touching = self._touching(spec, piece, SCALAR, state)
        flags = {entry.first_row: bool(entry.read()) for entry in self._touching(spec, piece, INITIALIZED)}
        ready = [entry for entry in touching if flags.get(entry.first_row, True)]
        chosen = ready or touching
        return float(chosen[0].read()) if chosen else 0.0
