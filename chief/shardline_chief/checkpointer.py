"""Fetches cuts from the servers and commits them, in a thread of its own: training and membership never wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardline.checkpoint import Checkpoint, CheckpointStore, Cut
from shardline.checkpoint.manifest import SEQUENCES, sequences_to_json
from shardline.digest import params_sha256
from shardline.errors import CheckpointError, ShardlineError
from shardline.image import BucketImage, WorkerSequence
from shardline.rpc.client import PsControl
from shardline.sharding import Plan
from shardline.spec import JobSpec, TensorKind
from shardline_chief.actions import Save, Saved

log = logging.getLogger("shardline_chief.checkpointer")

STATES = 8
"""A bucket's image is at most this many times its values (value, optimizer states in a wider dtype), or refused."""

Connect = Callable[[str, str], PsControl]


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run goes on from."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Step it was taken at."""
        return self.checkpoint.step

    @property
    def path(self) -> str:
        """Its folder."""
        return str(self.checkpoint.path)

    @property
    def cursor(self) -> Mapping[str, Any]:
        """Leases done, in asynchronous mode."""
        leases = self.checkpoint.manifest.extra.get("leases", {})
        return leases if isinstance(leases, dict) else {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each shard of its plan."""
        return tuple(self.checkpoint.manifest.versions)

    def check(self, job: JobSpec) -> None:
        """Raise CheckpointError where it is of another job."""
        for note in self.checkpoint.compatible(job):
            log.warning("resuming with another setting: %s", note)


class Checkpointer:
    """One cut at a time."""

    def __init__(self, store: CheckpointStore, connect: Connect, *, term: int) -> None:
        self.store = store
        self._connect = connect
        self._term = term
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        self._lock = threading.Lock()
        self._fetching: tuple[str, PsControl] | None = None
        """The server that is being asked for its cut."""
        self._gone: frozenset[str] = frozenset()
        """Servers that the save under way must not wait for."""

    def submit(self, save: Save, told: Callable[[Saved], None]) -> None:
        """Do it in the background; told() is called on the checkpointer's thread."""
        future: Future[Saved] = self._pool.submit(self._save, save)

        def done(finished: Future[Saved]) -> None:
            if not finished.cancelled():
                told(finished.result())

        future.add_done_callback(done)

    def find(self, lost: Collection[str], told: Callable[[Checkpoint | None, str], None]) -> None:
        """The newest whole checkpoint after what is being written, None where there is none yet; or why there is none.

        lost: servers from which nothing comes any more, so that a save does not wait for them. told() is called on the
        checkpointer's thread.
        """
        with self._lock:
            self._gone = frozenset(lost)
            if self._fetching is not None and self._fetching[0] in lost:
                # Its call ends with the connection, and the save with the call.
                self._fetching[1].close()

        def look() -> tuple[Checkpoint | None, str]:
            self._gone = frozenset()
            try:
                if not self.store.list():
                    return None, ""
                checkpoint = self.store.newest_valid()
            except (CheckpointError, OSError) as error:
                return None, str(error)
            except Exception as error:
                # Recovery waits for this answer, whatever it is.
                log.exception("no checkpoint could be looked for")
                return None, f"{type(error).__name__}: {error}"
            for warning in checkpoint.warnings:
                log.error("%s", warning)
            return checkpoint, ""

        def done(finished: Future[tuple[Checkpoint | None, str]]) -> None:
            if not finished.cancelled():
                told(*finished.result())

        self._pool.submit(look).add_done_callback(done)

    def _save(self, save: Save) -> Saved:
        start_s = time.monotonic()
        try:
            path, nbytes = self._commit(save)
        except (ShardlineError, OSError) as error:
            return Saved(step=save.step, error=str(error), seconds=time.monotonic() - start_s)
        except Exception as error:
            log.exception("checkpoint of step %d failed", save.step)
            return Saved(step=save.step, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - start_s)
        return Saved(step=save.step, path=path, seconds=time.monotonic() - start_s, nbytes=nbytes)

    def _commit(self, save: Save) -> tuple[str, int]:
        versions = [0] * len(save.plan.shards)
        sequences: list[dict[str, list[int]]] = [{} for _ in save.plan.shards]
        fetched = 0
        hosts = {place.shard: place for place in save.placement}

        def images(shard: int) -> Iterator[BucketImage]:
            nonlocal fetched
            buckets = save.plan.shards[shard].buckets
            if not buckets:
                return
            limit = STATES * max(bucket.nbytes for bucket in buckets) + (1 << 20)
            place = hosts[shard]
            control = self._connect(place.task, place.address)
            with self._lock:
                if place.task in self._gone:
                    control.close()
                    raise CheckpointError(f"{place.task} was lost with shard {shard} of it")
                self._fetching = place.task, control
            try:
                pushes: dict[str, WorkerSequence] = {}
                for image in control.get_cut(save.timeline, shard, save.step, max_bytes=limit, sequences=pushes):
                    # The manifest is written after the last shard, so it has these.
                    versions[shard] = max(versions[shard], image.version)
                    fetched += image.nbytes
                    yield image
                sequences[shard] = sequences_to_json(pushes)
            finally:
                with self._lock:
                    self._fetching = None
                control.close()

        sync = save.job.consistency.mode == "sync"
        extra: dict[str, Any] = {}
        if not sync:
            done = sum(end - first for first, end in save.cursor.get("done", []))
            extra = {"leases": dict(save.cursor), "cursor": {"batch": done}, SEQUENCES: sequences}
        path = self.store.commit(
            Cut(
                job=save.job,
                plan=save.plan,
                step=save.step,
                timeline=save.timeline,
                term=self._term,
                consistent=sync,
                versions=versions,
                images=images,
                extra=extra,
            )
        )
        return str(path), fetched

    def close(self) -> None:
        """Wait for what is being written; drop what waits."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def restore(control: PsControl, checkpoint: Checkpoint, plan: Plan, shard: int, timeline: int) -> None:
    """Fill one shard from a checkpoint, whatever plan it was written with.

    Of the plan it was written with, the shard also gets back which push of each worker was its last one.
    """
    versions = checkpoint.manifest.versions
    version = versions[shard] if plan.plan_id == checkpoint.plan.plan_id else max(versions)
    images, sequences = checkpoint.images(plan, shard), checkpoint.sequences(plan, shard)
    control.restore(timeline, shard, checkpoint.step, version, images, sequences)


def parameters_digest(checkpoint: Checkpoint) -> str:
    """sha256 of the parameters in a checkpoint, "" where it can't be read any more."""
    try:
        return params_sha256(
            {spec.name: checkpoint.tensor(spec.name) for spec in checkpoint.job.tensors if spec.kind in _PARAMETERS}
        )
    except CheckpointError as error:
        log.warning("no digest of the parameters: %s", error)
        return ""


_PARAMETERS = (TensorKind.PARAM, TensorKind.FROZEN)
