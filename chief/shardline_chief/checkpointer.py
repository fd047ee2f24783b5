"""Fetches cuts from the servers and commits them, in a thread of its own: training and membership never wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from shardline.checkpoint import Checkpoint, CheckpointStore, Cut
from shardline.digest import params_sha256
from shardline.errors import CheckpointError, ShardlineError
from shardline.image import BucketImage
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

    def submit(self, save: Save, told: Callable[[Saved], None]) -> None:
        """Do it in the background; told() is called on the checkpointer's thread."""
        future: Future[Saved] = self._pool.submit(self._save, save)

        def done(finished: Future[Saved]) -> None:
            if not finished.cancelled():
                told(finished.result())

        future.add_done_callback(done)

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
            try:
                for image in control.get_cut(save.timeline, shard, save.step, max_bytes=limit):
                    # The manifest is written after the last shard, so it has these.
                    versions[shard] = max(versions[shard], image.version)
                    fetched += image.nbytes
                    yield image
            finally:
                control.close()

        sync = save.job.consistency.mode == "sync"
        extra: dict[str, Any] = {}
        if not sync:
            done = sum(end - first for first, end in save.cursor.get("done", []))
            extra = {"leases": dict(save.cursor), "cursor": {"batch": done}}
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
    """Fill one shard from a checkpoint, whatever plan it was written with."""
    versions = checkpoint.manifest.versions
    version = versions[shard] if plan.plan_id == checkpoint.plan.plan_id else max(versions)
    control.restore(timeline, shard, checkpoint.step, version, checkpoint.images(plan, shard))


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
