"""One committed checkpoint, read lazily: any rows of any tensor, or the images of any other plan."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardline.checkpoint import manifest as manifests
from shardline.checkpoint.compat import resume_notes
from shardline.checkpoint.content import COMPLEX_KEYS, INITIALIZED, SCALAR, STATE, Key, stored_dtype
from shardline.checkpoint.files import file_digest, os_text
from shardline.checkpoint.manifest import FileEntry
from shardline.core.image import VALUE, BucketImage, WorkerSequence
from shardline.core.plan import BucketSpec, Plan, Slice
from shardline.core.spec import DTYPES, JobSpec, TensorSpec
from shardline.errors import CheckpointError
from shardline.host import files
from shardline.update import chosen


@dataclass
class _File:
    """A shard's file, memory-mapped; the mapping survives deletion of the file."""

    path: Path
    handle: Any
    keys: list[str]
    complex_keys: frozenset[str]


@dataclass(frozen=True, order=True)
class _Entry:
    """Rows [first_row, first_row + rows) of an entry in a file."""

    first_row: int
    rows: int
    shape: tuple[int, ...] = field(compare=False)
    dtype: str = field(compare=False)
    """As named in safetensors; for complex ones "complex " and the name of the parts."""
    file: _File = field(compare=False)
    key: str = field(compare=False)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) of the entry, as a tensor of its own."""
        try:
            if start == 0 and (stop is None or stop == self.rows):
                stored = self.file.handle.get_tensor(self.key)
            else:
                stored = self.file.handle.get_slice(self.key)[start:stop]
            copy: torch.Tensor = stored.clone()
            return torch.view_as_complex(copy) if self.key in self.file.complex_keys else copy
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.file.path}: {self.key!r} can't be read: {error}") from error


class Checkpoint:
    """A step's folder. Its manifest is checked when it is opened, its files' checksums by verify().

    Thread-safe for reading. Nothing is unpickled.
    """

    def __init__(self, path: Path, warnings: tuple[str, ...] = ()) -> None:
        described = manifests.read(path)
        self.path = path
        self.manifest = described.manifest
        self.job: JobSpec = described.job
        self.plan: Plan = described.plan
        self.step: int = described.manifest.step
        self.warnings = warnings
        """Messages about newer checkpoints that were skipped."""
        self._lock = threading.Lock()
        self._index: dict[tuple[str, str, str], list[_Entry]] | None = None

    def verify(self) -> None:
        """Read every file and compare size and SHA-256. Raises CheckpointError naming the file and the problem.

        No file is read before all of them have the right size.
        """
        for entry in self.manifest.files:
            with self._pinned(entry):
                pass
        for entry in self.manifest.files:
            with self._pinned(entry) as (path, pinned):
                _, sha256 = file_digest(pinned)
            if sha256 != entry.sha256:
                raise CheckpointError(
                    f"{path} is corrupt: its sha256 is {sha256[:16]}...; the manifest says {entry.sha256[:16]}..."
                )

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor in its shape and dtype, by name or alias. Raises CheckpointError if it is unknown."""
        return self.read_slice(name, 0, self._spec(name).rows)

    def state_dict(self, *, aliases: bool = True) -> dict[str, torch.Tensor]:
        """All values by state_dict name; an alias is the same tensor object as its original."""
        out = {}
        for spec in self.job.tensors:
            value = self.tensor(spec.name)
            for name in (spec.name, *(spec.aliases if aliases else ())):
                out[name] = value
        return out

    def read_slice(self, name: str, first_row: int, rows: int, what: str = VALUE) -> torch.Tensor:
        """Rows [first_row, first_row + rows) of a tensor's value, or of its optimizer state `what`.

        Shape (rows, *rest); () for a 0-d tensor, which has one row. A state whose shape is not its tensor's (of a
        whole-tensor rule) comes flat and only as a whole. Raises CheckpointError if the checkpoint does not contain it.
        """
        spec = self._spec(name)
        if not 0 <= first_row <= first_row + rows <= spec.rows:
            raise CheckpointError(f"{self.path}: {name!r} has {spec.rows} rows; rows {first_row} to {first_row + rows}")
        entries = self._entries(what, spec.name)
        if not entries:
            raise CheckpointError(f"{self.path}: {name!r} has no state {what!r}; it has {self.states(name) or 'none'}")
        if self._by_rows(spec, entries[0]):
            return self._gather(spec, entries, first_row, rows, gaps=False)
        if rows != spec.rows:
            raise CheckpointError(f"{self.path}: state {what!r} of {name!r} has no rows; read it whole")
        return entries[0].read()

    def states(self, name: str) -> list[str]:
        """Names of a tensor's optimizer states, sorted; without the per-tensor scalars."""
        tensor = self._spec(name).name
        return sorted(state for what, state, held in self._entry_index() if what == STATE and held == tensor)

    def scalars(self, name: str) -> dict[str, float]:
        """Per-tensor states such as "step"; if shards were cut one by one, those of the tensor's first rows."""
        tensor = self._spec(name).name
        index = self._entry_index()
        return {
            state: float(entries[0].read())
            for (what, state, held), entries in index.items()
            if what == SCALAR and held == tensor
        }

    def images(self, plan: Plan, shard: int) -> Iterator[BucketImage]:
        """The content of a shard of any plan for the same tensors, bucket by bucket, bit-exact.

        Step and version are the shard's own if the plan is the checkpoint's, else the highest of all shards; they
        differ only if the cut was not consistent.
        Raises CheckpointError if the plan's tensors are not the checkpoint's.
        """
        for tensor in plan.tensors:
            ours = self._spec(tensor.name)
            if (tensor.shape, tensor.dtype) != (ours.shape, ours.dtype):
                raise CheckpointError(
                    f"{self.path}: {tensor.name!r} is {ours.dtype} {ours.shape} here, "
                    f"{tensor.dtype} {tensor.shape} in the plan"
                )
        same = plan.plan_id == self.plan.plan_id
        steps, versions = self.manifest.steps, self.manifest.versions
        step, version = (steps[shard], versions[shard]) if same else (max(steps), max(versions))
        for number, bucket in enumerate(plan.shards[shard].buckets):
            yield self._image(
                plan, bucket, BucketImage(shard=shard, bucket=number, step=step, version=version, tensors={})
            )

    def sequences(self, plan: Plan, shard: int) -> dict[str, WorkerSequence]:
        """Each worker's last push that a shard of this checkpoint includes, by task; {} for another plan's shards.

        Also {} in synchronous mode and if the writer recorded none. Raises CheckpointError if they can't be read.
        """
        value = self.manifest.extra.get(manifests.SEQUENCES)
        if value is None or plan.plan_id != self.plan.plan_id:
            return {}
        try:
            return manifests.sequences_from_json(value, shard, len(self.plan.shards))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def compatible(self, job: JobSpec) -> list[str]:
        """Check that `job` can resume from here; see compat.resume_notes."""
        return resume_notes(self.job, job, str(self.path))

    def close(self) -> None:
        """Close the files; reading opens them again."""
        with self._lock:
            self._index = None

    def _spec(self, name: str) -> TensorSpec:
        number = self.plan.index.get(name)
        if number is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it has {len(self.plan.tensors)} others")
        return self.plan.tensors[number]

    def _entry_index(self) -> dict[tuple[str, str, str], list[_Entry]]:
        with self._lock:
            if self._index is None:
                self._index = self._build_index()
            return self._index

    def _build_index(self) -> dict[tuple[str, str, str], list[_Entry]]:
        index: dict[tuple[str, str, str], list[_Entry]] = {}
        for item in self.manifest.files:
            file = self._open(item)
            for text in file.keys:
                key = self._parse_key(file, text)
                stored = file.handle.get_slice(text)
                shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
                if text in file.complex_keys:
                    shape, dtype = shape[:-1], f"complex {dtype}"
                rows = shape[0] if shape and key.what in (VALUE, STATE) else 1
                entry = _Entry(key.first_row, rows, shape, dtype, file, text)
                index.setdefault((key.what, key.state, key.tensor), []).append(entry)
        for entries in index.values():
            entries.sort()
        for tensor in self.plan.tensors:
            self._check_covered(tensor, index.get((VALUE, "", tensor.name), []))
        for (what, _, name), entries in index.items():
            if what != VALUE:
                rows = {entry.first_row: entry.rows for entry in index[VALUE, "", name]}
                self._check_beside(self._spec(name), rows, what, entries)
        return index

    @contextlib.contextmanager
    def _pinned(self, entry: FileEntry) -> Iterator[tuple[Path, Path]]:
        """The path of a file of the right size, and a path that refers to this very file within the block."""
        path = self.path / entry.name
        try:
            with files.pinned(path) as pinned:
                size = pinned.stat().st_size
                if size < entry.bytes:
                    raise CheckpointError(f"{path} is truncated: it has {size} of {entry.bytes} bytes")
                if size > entry.bytes:
                    raise CheckpointError(f"{path} has {size} bytes; the manifest says {entry.bytes}")
                yield path, pinned
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {os_text(error)}") from error

    def _open(self, entry: FileEntry) -> _File:
        with self._pinned(entry) as (path, pinned):
            try:
                # The whole file is mapped now, so later changes of the name don't matter.
                handle: Any = safe_open(pinned, framework="pt", device="cpu")
                complex_keys = json.loads((handle.metadata() or {}).get(COMPLEX_KEYS, "[]"))
                return _File(path, handle, list(handle.keys()), frozenset(complex_keys))
            except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error

    def _parse_key(self, file: _File, text: str) -> Key:
        try:
            key = Key.parse(text)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from None
        number = self.plan.index.get(key.tensor)
        if number is None or self.plan.tensors[number].name != key.tensor:
            raise CheckpointError(f"{file.path}: entry {text!r} belongs to no tensor of the manifest")
        return key

    def _check_covered(self, tensor: TensorSpec, entries: list[_Entry]) -> None:
        row = 0
        for entry in entries:
            if entry.first_row != row or not self._by_rows(tensor, entry):
                raise CheckpointError(f"{entry.file.path}: {entry.key!r} has shape {entry.shape} or rows out of place")
            if entry.dtype != stored_dtype(tensor.dtype):
                raise CheckpointError(
                    f"{entry.file.path}: {entry.key!r} is stored as {entry.dtype}; the tensor is {tensor.dtype}"
                )
            row += entry.rows
        if not entries or row != tensor.rows:
            raise CheckpointError(f"{self.path} has {row} of the {tensor.rows} rows of {tensor.name!r}")

    def _check_beside(self, tensor: TensorSpec, rows: Mapping[int, int], what: str, entries: list[_Entry]) -> None:
        """Check the entries of one state, scalar or flag. rows: those of the tensor's values, by first row."""
        by_rows = what == STATE and self._by_rows(tensor, entries[0])
        for entry in entries:
            right = not entry.shape if what != STATE else self._by_rows(tensor, entry) == by_rows
            if by_rows and (entry.rows != rows.get(entry.first_row) or entry.dtype != entries[0].dtype):
                right = False
            if not right or entry.first_row not in rows:
                raise CheckpointError(
                    f"{entry.file.path}: {entry.key!r} has shape {entry.shape} and dtype {entry.dtype}, which match "
                    f"neither the values of {tensor.name!r} nor the entries for other rows"
                )

    @staticmethod
    def _by_rows(tensor: TensorSpec, entry: _Entry) -> bool:
        """Whether an entry has the shape of rows of its tensor."""
        if not tensor.shape:
            return entry.shape == ()
        return len(entry.shape) == len(tensor.shape) and entry.shape[1:] == tensor.shape[1:]

    def _entries(self, what: str, tensor: str) -> list[_Entry]:
        return self._entry_index().get((VALUE, "", tensor) if what == VALUE else (STATE, what, tensor), [])

    def _gather(
        self, spec: TensorSpec, entries: list[_Entry], first_row: int, rows: int, *, gaps: bool
    ) -> torch.Tensor:
        """Rows from all entries that contain them; zeros for missing rows, if gaps are allowed."""
        if not spec.shape:
            return entries[0].read()
        parts = []
        row, end = first_row, first_row + rows
        for entry in entries:
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

    def _gap(self, spec: TensorSpec, entries: list[_Entry], low: int, high: int, gaps: bool) -> torch.Tensor:
        if high > low and not gaps:
            raise CheckpointError(f"{self.path}: {entries[0].key!r} and related entries lack rows {low} to {high}")
        example = entries[0].read(0, 0) if entries[0].rows else entries[0].read()
        return torch.zeros((high - low, *spec.shape[1:]), dtype=example.dtype)

    def _image(self, plan: Plan, bucket: BucketSpec, head: BucketImage) -> BucketImage:
        """`head` filled with the bucket's content."""
        specs = [self._spec(plan.tensors[piece.tensor].name) for piece in bucket.slices]
        values = torch.zeros(bucket.elements, dtype=DTYPES[bucket.dtype])
        for piece, spec in zip(bucket.slices, specs, strict=True):
            values[piece.offset : piece.end] = self.read_slice(spec.name, piece.first_row, piece.rows).reshape(-1)
        held = self._entry_index()
        in_bucket = {spec.name for spec in specs}
        tensors = {VALUE: values}
        for state in sorted({state for what, state, name in held if what == STATE and name in in_bucket}):
            tensors[state] = self._state(plan, bucket, specs, state)
        flags = [self._flag(spec, piece) for spec, piece in zip(specs, bucket.slices, strict=True)]
        scalars = {
            state: tuple(self._scalar(spec, piece, state) for spec, piece in zip(specs, bucket.slices, strict=True))
            for state in sorted({state for what, state, name in held if what == SCALAR and name in in_bucket})
        }
        return dataclasses.replace(
            head,
            tensors=tensors,
            scalars=scalars,
            initialized=() if all(flag is None for flag in flags) else tuple(bool(flag) for flag in flags),
        )

    def _state(self, plan: Plan, bucket: BucketSpec, specs: list[TensorSpec], state: str) -> torch.Tensor:
        """A state's flat tensor; zeros for padding and for tensors without that state."""
        rule, method = self.job.rule, chosen(self.job.rule)
        spans = method.state_spans(rule, state, bucket, plan.tensors)
        total = method.flat_elements(rule, state, bucket, plan.tensors)
        flat: torch.Tensor | None = None
        for piece, spec, (offset, elements) in zip(bucket.slices, specs, spans, strict=True):
            entries = self._entries(state, spec.name)
            if not entries:
                continue
            if self._by_rows(spec, entries[0]):
                part = self._gather(spec, entries, piece.first_row, piece.rows, gaps=True)
            else:
                part = entries[0].read()
            if part.numel() != elements:
                raise CheckpointError(
                    f"{self.path}: state {state!r} of {spec.name!r} has {part.numel()} elements; update rule "
                    f"{method.label(rule)} needs {elements}"
                )
            if flat is None:
                flat = torch.zeros(total, dtype=part.dtype)
            flat[offset : offset + elements] = part.reshape(-1)
        assert flat is not None
        return flat

    @staticmethod
    def _touching(entries: list[_Entry], starts: list[_Entry], piece: Slice) -> list[_Entry]:
        """Entries of slices that contain rows of the piece; `starts` are the value entries, which have the ranges."""
        rows = {entry.first_row: entry.rows for entry in starts}
        end = piece.first_row + max(1, piece.rows)
        return [e for e in entries if e.first_row < end and e.first_row + max(1, rows[e.first_row]) > piece.first_row]

    def _flag(self, spec: TensorSpec, piece: Slice) -> bool | None:
        entries = self._entry_index().get((INITIALIZED, "", spec.name), [])
        touching = self._touching(entries, self._entries(VALUE, spec.name), piece)
        return any(bool(entry.read()) for entry in touching) if touching else None

    def _scalar(self, spec: TensorSpec, piece: Slice, state: str) -> float:
        """The scalar of a piece's rows. If shards were cut one by one, that of the first initialized slice."""
        index, values = self._entry_index(), self._entries(VALUE, spec.name)
        touching = self._touching(index.get((SCALAR, state, spec.name), []), values, piece)
        flags = {e.first_row: bool(e.read()) for e in index.get((INITIALIZED, "", spec.name), [])}
        ready = [entry for entry in touching if flags.get(entry.first_row, True)]
        chosen = ready or touching
        return float(chosen[0].read()) if chosen else 0.0
