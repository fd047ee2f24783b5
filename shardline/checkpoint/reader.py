"""One committed checkpoint, read lazily: any rows of any tensor, or the images of any other plan."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardline.checkpoint import manifest as manifests
from shardline.checkpoint.compat import resume_notes
from shardline.checkpoint.content import COMPLEX_KEYS, STATE, Key, stored_dtype
from shardline.checkpoint.files import file_digest, os_text
from shardline.checkpoint.manifest import FileEntry
from shardline.checkpoint.stored import StoredFile, StoredRows, StoredTensors, by_rows
from shardline.checkpoint.tables import StoredTable
from shardline.core.image import VALUE, BucketImage, WorkerSequence
from shardline.core.plan import Plan
from shardline.core.spec import JobSpec, TensorKind, TensorSpec, joined
from shardline.errors import CheckpointError
from shardline.host import files
from shardline.storage.table import IDS


class Checkpoint:
    """A step's folder. Its manifest is checked when it is opened, its files' checksums by verify().

    Thread-safe for reading. Nothing is unpickled.
    """

    def __init__(self, path: Path) -> None:
        described = manifests.read(path)
        self.path = path
        self.manifest = described.manifest
        self.job: JobSpec = described.job
        self.plan: Plan = described.plan
        self.step: int = described.manifest.step
        self.warnings: tuple[str, ...] = ()
        """Messages about newer checkpoints that were skipped."""
        self._lock = threading.Lock()
        self._stored: StoredTensors | None = None
        self._whole: StoredTensors | None = None
        self._tables: dict[str, StoredTable] = {}

    @functools.cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Those of the state_dict, in the plan's order: whole, also where workers shared layers. Without tables."""
        return tuple(tensor for tensor in joined(self.job.tensors) if tensor.kind is not TensorKind.TABLE)

    @functools.cached_property
    def tables(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.job.tensors if tensor.kind is TensorKind.TABLE)

    def table(self, name: str) -> StoredTable:
        """A table. Raises CheckpointError if there is none of this name."""
        self._contents()
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise CheckpointError(f"{self.path} has no table {name!r}; its tables: {known}")
        return self._tables[name]

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table: float32 [U, dim]; those that are not stored are as its `init` makes them. ids: int64 [U]."""
        return self.table(table).find(ids)[0]

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
        return self.read_slice(name, 0, self._wholes().spec(name).rows)

    def state_dict(self, *, aliases: bool = True) -> dict[str, torch.Tensor]:
        """All values by state_dict name; an alias is the same tensor object as its original."""
        out = {}
        for spec in self.tensors:
            value = self.tensor(spec.name)
            for name in (spec.name, *(spec.aliases if aliases else ())):
                out[name] = value
        return out

    def flat_tables(self) -> dict[str, Iterator[torch.Tensor]]:
        """Stored rows of all tables, as `<table>.ids` (int64 [n]) and `<table>.rows` ([n, dim]), file by file."""
        found = {}
        for spec in self.tables:
            table = self.table(spec.name)
            found[f"{spec.name}.ids"], found[f"{spec.name}.rows"] = table.column(IDS), table.column(VALUE)
        return found

    def read_slice(self, name: str, first_row: int, rows: int, what: str = VALUE) -> torch.Tensor:
        """Rows [first_row, first_row + rows) of a tensor's value, or of its optimizer state `what`.

        Shape (rows, *rest); () for a 0-d tensor, which has one row. A state whose shape is not its tensor's (of a
        whole-tensor rule) comes flat and only as a whole. Raises CheckpointError if the checkpoint does not contain it.
        """
        return self._wholes().read_slice(name, first_row, rows, what)

    def states(self, name: str) -> list[str]:
        """Names of a tensor's optimizer states, sorted; without the per-tensor scalars."""
        return self._wholes().states(name)

    def scalars(self, name: str) -> dict[str, float]:
        """Per-tensor states such as "step"; if shards were cut one by one, those of the tensor's first rows."""
        return self._wholes().scalars(name)

    def images(self, plan: Plan, shard: int) -> Iterator[BucketImage]:
        """The content of a shard of any plan for the same tensors, bucket by bucket, bit-exact.

        Step and version are the shard's own if the plan is the checkpoint's, else the highest of all shards; they
        differ only if the cut was not consistent.
        Raises CheckpointError if the plan's tensors are not the checkpoint's.
        """
        contents = self._contents().recut([one for one in plan.tensors if one.kind is not TensorKind.TABLE])
        same = plan.plan_id == self.plan.plan_id
        steps, versions = self.manifest.steps, self.manifest.versions
        step, version = (steps[shard], versions[shard]) if same else (max(steps), max(versions))
        for number, bucket in enumerate(plan.shards[shard].buckets):
            head = BucketImage(shard=shard, bucket=number, step=step, version=version, tensors={})
            if bucket.kind is TensorKind.TABLE:
                wanted = plan.tensors[bucket.slices[0].tensor]
                yield self.table(wanted.name).image(head, bucket.slices[0], wanted)
            else:
                yield contents.image(plan, bucket, head)

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
            self._stored = self._whole = None
            self._tables = {}

    def _wholes(self) -> StoredTensors:
        """Stored entries, by tensor of the state_dict."""
        contents = self._contents()
        with self._lock:
            if self._whole is None:
                self._whole = contents.recut(self.tensors)
            return self._whole

    def _contents(self) -> StoredTensors:
        with self._lock:
            if self._stored is None:
                index = self._build_index()
                for spec in self.tables:
                    pieces = self.plan.pieces(self.plan.index[spec.name])
                    firsts = sorted(piece.first_row for _, _, piece in pieces)
                    self._tables[spec.name] = StoredTable(self.path, spec, firsts, index.pop(spec.name))
                dense = [one for one in self.plan.tensors if one.kind is not TensorKind.TABLE]
                self._stored = StoredTensors(self.path, self.job.rule, dense, index)
            return self._stored

    def _build_index(self) -> dict[str, dict[tuple[str, str], list[StoredRows]]]:
        index: dict[str, dict[tuple[str, str], list[StoredRows]]] = {tensor.name: {} for tensor in self.plan.tensors}
        for item in self.manifest.files:
            file = self._open(item)
            for text in file.keys:
                key = self._parse_key(file, text)
                stored = file.handle.get_slice(text)
                shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
                if text in file.complex_keys:
                    shape, dtype = shape[:-1], f"complex {dtype}"
                rows = shape[0] if shape and key.what in (VALUE, STATE) else 1
                entry = StoredRows(key.first_row, rows, shape, dtype, file, text)
                index[key.tensor].setdefault((key.what, key.state), []).append(entry)
        for tensor in self.plan.tensors:
            held = index[tensor.name]
            for entries in held.values():
                entries.sort()
            if tensor.kind is TensorKind.TABLE:
                continue
            values = held.get((VALUE, ""), [])
            self._check_covered(tensor, values)
            rows = {entry.first_row: entry.rows for entry in values}
            for (what, _), entries in held.items():
                if what != VALUE:
                    self._check_beside(tensor, rows, what, entries)
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

    def _open(self, entry: FileEntry) -> StoredFile:
        with self._pinned(entry) as (path, pinned):
            try:
                # The whole file is mapped now, so later changes of the name don't matter.
                handle: Any = safe_open(pinned, framework="pt", device="cpu")
                complex_keys = json.loads((handle.metadata() or {}).get(COMPLEX_KEYS, "[]"))
                return StoredFile(path, handle, list(handle.keys()), frozenset(complex_keys))
            except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error

    def _parse_key(self, file: StoredFile, text: str) -> Key:
        try:
            key = Key.parse(text)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from None
        number = self.plan.index.get(key.tensor)
        if number is None or self.plan.tensors[number].name != key.tensor:
            raise CheckpointError(f"{file.path}: entry {text!r} belongs to no tensor of the manifest")
        return key

    def _check_covered(self, tensor: TensorSpec, entries: list[StoredRows]) -> None:
        row = 0
        for entry in entries:
            if entry.first_row != row or not by_rows(tensor, entry):
                raise CheckpointError(f"{entry.file.path}: {entry.key!r} has shape {entry.shape} or rows out of place")
            if entry.dtype != stored_dtype(tensor.dtype):
                raise CheckpointError(
                    f"{entry.file.path}: {entry.key!r} is stored as {entry.dtype}; the tensor is {tensor.dtype}"
                )
            row += entry.rows
        if not entries or row != tensor.rows:
            raise CheckpointError(f"{self.path} has {row} of the {tensor.rows} rows of {tensor.name!r}")

    def _check_beside(self, tensor: TensorSpec, rows: Mapping[int, int], what: str, entries: list[StoredRows]) -> None:
        """Check the entries of one state, scalar or flag. rows: those of the tensor's values, by first row."""
        laid_out = what == STATE and by_rows(tensor, entries[0])
        for entry in entries:
            right = not entry.shape if what != STATE else by_rows(tensor, entry) == laid_out
            if laid_out and (entry.rows != rows.get(entry.first_row) or entry.dtype != entries[0].dtype):
                right = False
            if not right or entry.first_row not in rows:
                raise CheckpointError(
                    f"{entry.file.path}: {entry.key!r} has shape {entry.shape} and dtype {entry.dtype}, which match "
                    f"neither the values of {tensor.name!r} nor the entries for other rows"
                )
