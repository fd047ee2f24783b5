"""A folder of checkpoints: commit, find, fall back, retain.

    store = CheckpointStore(Path("run/checkpoints"), keep=3)
    store.commit(CheckpointContents(...))
    checkpoint = store.newest_valid()

The commit point is the rename of a complete, durable, re-read folder (PROTOCOL 1.7). `latest` and `best` are hints for
people; no decision depends on them, except that the best step is retained.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.checkpoint import manifest as manifests
from shardline.checkpoint.content import ContentDigest, safetensors_chunks, shard_entries, slice_rows
from shardline.checkpoint.files import Files, explained, file_digest, os_text, try_lock
from shardline.checkpoint.loaders import LOADERS, LoaderStates, unpack
from shardline.checkpoint.manifest import FileEntry, parse_step_folder, shard_file, step_folder
from shardline.checkpoint.reader import Checkpoint
from shardline.core.image import BucketImage
from shardline.core.plan import Plan
from shardline.core.spec import JobSpec
from shardline.errors import CheckpointError, UsageError
from shardline.host import files

LATEST, BEST = "latest", "best"
BEST_BYTES = 1 << 20
"""Most bytes of the hint `best`: a step and its metrics."""
_TEMPORARY, _TRASH = "tmp-", "trash-"

Images = Mapping[int, Iterable[BucketImage]] | Callable[[int], Iterable[BucketImage]]
"""Images by shard number. A function that fetches when called needs memory for only one shard at a time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The content of a checkpoint. In synchronous mode every image is of `step`."""

    job: JobSpec
    plan: Plan
    step: int
    timeline: int
    term: int
    consistent: bool
    """Whether all shards are at `step` (synchronous mode)."""
    versions: Sequence[int]
    """Number of applied updates, per shard."""
    images: Images
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that a mode needs: leases, worker sequences; read after the last image, so images may add to them.
    "cursor" is the position in the data order, by default {"step": step}."""


@dataclass(frozen=True)
class Best:
    """The step with the best evaluation so far."""

    step: int
    metrics: Mapping[str, float]


class CheckpointStore:
    """The checkpoints of one job in one folder, which need not exist yet. Thread-safe."""

    def __init__(self, dir: Path, keep: int, *, files: Files | None = None) -> None:
        """keep: number of newest checkpoints that are retained, at least 1.

        Deletes the leftovers of dead writers; a living writer's folder is locked, and stays.
        """
        if keep < 1:
            raise UsageError(f"the number of checkpoints to keep is {keep}; it must be at least 1")
        self.dir = dir
        self.keep = keep
        self.loaders = LoaderStates()
        """Of the checkpoints to come."""
        self._files = files or Files()
        self._committing = threading.Lock()
        self._retaining = threading.Lock()
        """Held while choosing what to delete: no step may be deleted between being listed and being marked."""
        self._protected = Counter[int]()
        """How many readers need a step."""
        if self.dir.is_dir():
            for path in sorted(self.dir.iterdir()):
                if path.name.startswith((_TEMPORARY, _TRASH)) and path.is_dir():
                    self._sweep_one(path)

    # Writing.

    def commit(self, cut: CheckpointContents) -> Path:
        """Write a cut and make it the newest checkpoint; returns its folder.

        A step that exists with the same content is left as it is; a damaged one is replaced. Raises CheckpointError if
        the step exists with other content, if the cut doesn't match its plan, or if the disk is full, read-only or
        failing. Earlier checkpoints then stay as they were.
        """
        with self._committing:
            target = self.dir / step_folder(cut.step)
            if cut.plan.tensors != cut.job.tensors:
                raise CheckpointError(f"the tensors in the plan of the cut of step {cut.step} are not those of its job")
            if len(cut.versions) != len(cut.plan.shards):
                raise CheckpointError(
                    f"the cut of step {cut.step} has {len(cut.versions)} versions for {len(cut.plan.shards)} shards"
                )
            lost = f"the checkpoint of step {cut.step} was not written"
            with explained("writing a checkpoint:", self.dir, lost):
                if not self.dir.is_dir():
                    self.dir.mkdir(parents=True)
                    self._files.sync_folder(self.dir.parent)
                temporary = self.dir / f"{_TEMPORARY}{cut.term}-{cut.step}"
                self._clear(temporary)
                self._files.make_folder(temporary)
                lock = _hold(temporary)
                try:
                    self._write_and_rename(cut, temporary, target)
                except Exception:
                    self._discard(temporary)
                    raise
                finally:
                    if lock is not None:
                        os.close(lock)
            self._hint(LATEST, f"{target.name}\n".encode())
            with self._retaining:
                self._retain(cut.step)
            return target

    def _write_and_rename(self, cut: CheckpointContents, temporary: Path, target: Path) -> None:
        content = self._write(cut, temporary)
        aside = None
        if target.exists():
            if self._same(target, content):
                self._discard(temporary)
                self._files.sync_folder(self.dir)
                return
            aside = self._set_aside(target)
        try:
            self._files.rename(temporary, target)
        except OSError:
            if aside is not None:
                # The disk may have failed, rather than the checkpoint on it.
                self._files.rename(aside, target)
            raise
        if aside is not None:
            self._discard(aside)
        try:
            self._files.sync_folder(self.dir)
        except OSError as error:
            raise CheckpointError(
                f"{target} is complete, but {self.dir} can't be synced to disk: {os_text(error)}; a power failure may "
                "lose it"
            ) from error

    def _write(self, cut: CheckpointContents, folder: Path) -> str:
        """Write and re-read all files of a cut; returns the digest of its content."""
        digest = ContentDigest(cut.job.tensors)
        num_shards = len(cut.plan.shards)
        entries, steps = [], []
        for shard in range(num_shards):
            images = _fetch(cut, shard)
            steps.append(max((image.step for image in images), default=cut.step))
            held = shard_entries(images, cut.plan, shard, cut.job.rule)
            digest.add(held, slice_rows(cut.plan, shard))
            path = folder / shard_file(shard, num_shards)
            size, sha256 = self._files.write(path, safetensors_chunks(held))
            entries.append(FileEntry(name=path.name, bytes=size, sha256=sha256))
            del images, held
        extra = manifests.plain_json(cut.extra)
        cursor = extra.pop("cursor", {"step": cut.step})
        data = manifests.encode(
            cut.job,
            cut.plan,
            step=cut.step,
            timeline=cut.timeline,
            term=cut.term,
            consistent=cut.consistent,
            versions=cut.versions,
            steps=steps,
            files=entries,
            content_sha256=digest.hexdigest(),
            cursor=cursor,
            extra=extra,
        )
        self._files.write(folder / manifests.MANIFEST, [data])
        self._files.sync_folder(folder)
        for entry in entries:
            if file_digest(folder / entry.name) != (entry.bytes, entry.sha256):
                raise CheckpointError(
                    f"{folder / entry.name} reads back different bytes than were written; check the disk"
                )
        manifests.read(folder)
        return digest.hexdigest()

    def _same(self, target: Path, content: str) -> bool:
        """Whether an existing step is this cut; False if it is damaged. Raises CheckpointError if it is another."""
        try:
            existing = Checkpoint(target)
            existing.verify()
        except CheckpointError as error:
            _log.warning("replacing a damaged checkpoint: %s", error)
            return False
        if existing.manifest.content_sha256 == content:
            return True
        raise CheckpointError(
            f"{target} exists with different content (sha256 {existing.manifest.content_sha256[:16]}...; the cut has "
            f"{content[:16]}...): training gave different results after the rollback, or --out belongs to another run"
        )

    def mark_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Retain this step until a better one is marked. Raises CheckpointError if it doesn't exist."""
        with self._retaining:
            if step not in self.list():
                raise CheckpointError(f"{self.dir} has no checkpoint of step {step} to mark as the best")
            # JSON has no NaN, but a metric may be NaN.
            known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self._hint(BEST, json.dumps({"step": step, "metrics": known}).encode())

    def protect(self, step: int) -> None:
        """Keep a step from being deleted while someone (the evaluator) needs it."""
        with self._retaining:
            self._protected[step] += 1

    def unprotect(self, step: int) -> None:
        with self._retaining:
            self._protected -= Counter({step: 1})

    # Reading.

    def list(self) -> list[int]:
        """Committed steps in the folder, ascending, valid or not."""
        return committed_steps(self.dir)

    def best(self) -> Best | None:
        """The marked best step; None if there is none or the hint can't be read."""
        return marked_best(self.dir)

    def open(self, step: int, *, verify: bool = True) -> Checkpoint:
        """The checkpoint of a step, with verified checksums. Raises CheckpointError if it is missing or damaged."""
        path = self.dir / step_folder(step)
        if not path.is_dir():
            raise CheckpointError(f"{self.dir} has no checkpoint of step {step}; it has {_steps_text(self.list())}")
        checkpoint = Checkpoint(path)
        if verify:
            checkpoint.verify()
        return checkpoint

    def loader_state(self, loader: str, step: int) -> str:
        """The state of a script's loader before a step, handed over or from the step's checkpoint; "" = none."""
        if state := self.loaders.find(loader, step):
            return state
        try:
            found = self.open(step, verify=False).manifest.extra.get(LOADERS)
        except CheckpointError:
            return ""
        kept = found.get(loader) if isinstance(found, dict) else ""
        return unpack(kept) if isinstance(kept, str) else ""

    def newest_valid(self) -> Checkpoint:
        """The newest valid checkpoint. Its `warnings` name newer ones that are damaged, and why.

        Raises CheckpointError if there is none.
        """
        return newest_valid(self.dir)

    # Housekeeping.

    def _hint(self, name: str, content: bytes) -> None:
        path = self.dir / name
        try:
            self._files.replace(path, content)
        except OSError as error:
            # Only a hint: the checkpoint is committed, so an error would be wrong.
            _log.warning("%s can't be replaced: %s", path, os_text(error))

    def _retain(self, committed: int) -> None:
        """Delete old steps up to the one just committed, except the newest `keep`, the best and the protected ones.

        Called with _retaining held. The step just committed was read back and nothing newer is touched, so a valid
        newer checkpoint always remains. Newer steps are from before a rollback, and stay until the job reaches them
        again.
        """
        steps = [step for step in self.list() if step <= committed]
        best = self.best()
        kept = {committed, *steps[-self.keep :], *self._protected, *([best.step] if best else [])}
        for step in steps:
            if step not in kept:
                path = self.dir / step_folder(step)
                try:
                    # Delete a checkpoint; it is renamed first, so no one ever lists a half-deleted one.
                    self._discard(self._set_aside(path))
                except OSError as error:
                    _log.warning("%s can't be deleted: %s", path, os_text(error))

    def _set_aside(self, path: Path) -> Path:
        trash = self.dir / f"{_TRASH}{path.name}-{uuid.uuid4().hex[:8]}"
        self._files.rename(path, trash)
        return trash

    def _discard(self, path: Path) -> None:
        try:
            self._files.remove_tree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("leftover %s can't be deleted: %s", path, os_text(error))

    def _clear(self, temporary: Path) -> None:
        """Delete a temporary folder that a dead writer may have left since the store was opened."""
        if temporary.exists():
            self._sweep_one(temporary)
        if temporary.exists():
            raise CheckpointError(f"{temporary} is being written by another process; is a second chief running?")

    def _sweep_one(self, path: Path) -> None:
        try:
            lock = try_lock(path)
        except OSError as error:
            _log.warning("leftover %s can't be deleted: %s", path, os_text(error))
            return
        if lock is None:
            return
        try:
            self._discard(path)
        finally:
            os.close(lock)


def _hold(folder: Path) -> int | None:
    """Lock a new folder; None on a file system that can't lock folders, where nothing is swept either."""
    try:
        lock = try_lock(folder)
    except OSError as error:
        _log.debug("%s can't be locked: %s", folder, os_text(error))
        return None
    if lock is None:
        raise CheckpointError(f"{folder} was created by another process at the same time; is a second chief running?")
    return lock


def marked_best(folder: Path) -> Best | None:
    """The step that is marked as the best in a folder of checkpoints; None if none is, or the mark can't be read."""
    try:
        value = json.loads(files.read_bytes(folder / BEST, BEST_BYTES))
        metrics = {str(k): math.nan if v is None else float(v) for k, v in value["metrics"].items()}
        step = value["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return Best(step, metrics) if type(step) is int and step in committed_steps(folder) else None


def committed_steps(dir: Path) -> list[int]:
    """Steps that have a folder, ascending. Raises CheckpointError if the folder can't be listed."""
    try:
        names = [path.name for path in dir.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{dir} can't be listed: {os_text(error)}") from error
    return sorted(step for step in map(parse_step_folder, names) if step is not None)


def newest_valid(dir: Path) -> Checkpoint:
    warnings: list[str] = []
    for step in reversed(committed_steps(dir)):
        try:
            checkpoint = Checkpoint(dir / step_folder(step))
            checkpoint.verify()
        except CheckpointError as error:
            warnings.append(f"skipping the checkpoint of step {step}: {error}")
            continue
        checkpoint.warnings = tuple(warnings)
        return checkpoint
    if warnings:
        raise CheckpointError(f"{dir} has no complete checkpoint: " + "; ".join(warnings))
    raise CheckpointError(f"{dir} contains no checkpoint")


def _steps_text(steps: Sequence[int]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(map(str, steps[-10:]))
    return f"steps {shown}" if len(steps) <= 10 else f"{len(steps)} steps, the last {shown}"


def _fetch(cut: CheckpointContents, shard: int) -> list[BucketImage]:
    """All images of a shard, checked to be of the cut's step."""
    try:
        images = list(cut.images(shard) if callable(cut.images) else cut.images[shard])
    except (KeyError, OSError) as error:
        # An OSError here comes from a connection, not from the disk.
        raise CheckpointError(f"shard {shard} of the cut of step {cut.step} can't be fetched: {error!r}") from error
    for image in images:
        if cut.consistent and image.step != cut.step:
            raise CheckpointError(
                f"shard {image.shard}, bucket {image.bucket} is at step {image.step} in the cut of step {cut.step}; "
                "the cut is discarded, since all buckets of a synchronous cut must be at the same step"
            )
    return images
