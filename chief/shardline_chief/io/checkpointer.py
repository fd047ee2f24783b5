"""Fetches cuts from the servers and commits them on a thread of its own; training and membership never wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from shardline import consistency
from shardline.checkpoint import Checkpoint, CheckpointContents, CheckpointStore
from shardline.checkpoint.loaders import LOADERS
from shardline.checkpoint.manifest import SEQUENCES, sequences_to_json
from shardline.cluster import parse_address
from shardline.core.image import BucketImage, WorkerSequence, replica_of
from shardline.core.plan import Plan
from shardline.core.spec import TensorKind
from shardline.core.tensor_bytes import params_sha256
from shardline.errors import CheckpointError, ShardlineError
from shardline.host.ports import on_this_host
from shardline.rpc.client import PsControl
from shardline_chief.io.pacing import LEAST_RATE, FetchPace, Links, TokenBucket, fetched
from shardline_chief.rules.actions import Save, Saved

log = logging.getLogger("shardline_chief.io.checkpointer")

KEEP_ALL = 1 << 30

STATES = 8
"""Largest accepted bucket image, in multiples of the bucket's values (values plus optimizer states in wider dtypes)."""

Connect = Callable[[str, str], PsControl]


class Checkpointer:
    """Saves one cut at a time."""

    def __init__(self, store: CheckpointStore, connect: Connect, *, term: int) -> None:
        self.store = store
        self._links = Links()
        """What is known of the links' rates."""
        self._bucket = TokenBucket()
        self._hurry = threading.Event()
        """Set while someone waits for the running save."""
        self._hurried = 0
        """How many callers wait for it."""
        self._connect = connect
        self._term = term
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        self._lock = threading.Lock()
        self._fetching: tuple[str, PsControl] | None = None
        """The server whose cut is being fetched."""
        self._gone: frozenset[str] = frozenset()
        """Servers that the running save must not wait for."""

    def submit(self, save: Save, told: Callable[[Saved], None]) -> None:
        """Save in the background; told() is called on the checkpointer's thread."""
        if save.urgent:
            self._hasten(1)
        future: Future[Saved] = self._pool.submit(self._save, save)

        def done(finished: Future[Saved]) -> None:
            self._hasten(-1 if save.urgent else 0)
            if not finished.cancelled():
                told(finished.result())

        future.add_done_callback(done)

    def hurry(self) -> None:
        """Fetch the rest of the running save at full speed."""
        self._hurry.set()

    def _hasten(self, change: int) -> None:
        with self._lock:
            self._hurried += change
            if self._hurried:
                self._hurry.set()
            else:
                self._hurry.clear()

    def find(self, lost: Collection[str], told: Callable[[Checkpoint | None, str], None]) -> None:
        """Look for the newest valid checkpoint, once the running save is over.

        told(checkpoint, error) is called on the checkpointer's thread; checkpoint is None if there is none yet, or if
        error says why none can be used. lost: servers that no longer answer, so a save does not wait for them.
        """
        self._hasten(1)
        with self._lock:
            self._gone = frozenset(lost)
            if self._fetching is not None and self._fetching[0] in lost:
                # Closing the connection ends the call, and with it the save.
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
                log.exception("the search for a checkpoint failed")
                return None, f"{type(error).__name__}: {error}"
            for warning in checkpoint.warnings:
                log.error("%s", warning)
            return checkpoint, ""

        def done(finished: Future[tuple[Checkpoint | None, str]]) -> None:
            self._hasten(-1)
            if not finished.cancelled():
                told(*finished.result())

        self._pool.submit(look).add_done_callback(done)

    def _save(self, save: Save) -> Saved:
        start_s = time.monotonic()
        try:
            path, fetch = self._commit(save)
        except (ShardlineError, OSError) as error:
            return Saved(step=save.step, error=str(error), seconds=time.monotonic() - start_s)
        except Exception as error:
            log.exception("checkpoint of step %d failed", save.step)
            return Saved(step=save.step, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - start_s)
        seconds = time.monotonic() - start_s
        took = fetched(fetch.seconds, fetch.nbytes, fetch.spared, self._links)
        return Saved(
            step=save.step,
            path=path,
            seconds=seconds,
            nbytes=sum(fetch.nbytes.values()),
            least_s=seconds - took.seconds + took.least_s,
            link_rate=took.link_rate,
        )

    def _commit(self, save: Save) -> tuple[str, _Fetch]:
        fetch = _Fetch(save)
        mode = consistency.of(save.job.consistency)
        extra = mode.batches.stored(save.cursor)
        if mode.clock is consistency.Clock.VERSION:
            extra[SEQUENCES] = fetch.sequences
        if loaders := self.store.loaders.of(save.step):
            extra[LOADERS] = loaders
        self.store.keep = save.job.checkpoint_keep or KEEP_ALL
        path = self.store.commit(
            CheckpointContents(
                job=save.job,
                plan=save.plan,
                step=save.step,
                timeline=save.timeline,
                term=self._term,
                consistent=mode.cuts.consistent,
                versions=fetch.versions,
                images=lambda shard: self._images(fetch, shard),
                extra=extra,
            )
        )
        self.store.loaders.committed(save.step)
        return str(path), fetch

    def _images(self, fetch: _Fetch, shard: int) -> Iterator[BucketImage]:
        """Fetch a shard's part of the cut from its server."""
        save = fetch.save
        if not save.plan.shards[shard].buckets:
            return
        place = fetch.hosts[shard]
        control = self._connect(place.task, place.address)
        with self._lock:
            if place.task in self._gone:
                control.close()
                raise CheckpointError(f"{place.task} was lost with its shard {shard}")
            self._fetching = place.task, control
        try:
            yield from fetch.read(control, shard, self._pace(fetch, shard, place.address))
        except (ShardlineError, ValueError) as error:
            # gRPC raises ValueError for further calls on a connection that find() has closed.
            with self._lock:
                lost = place.task in self._gone
            if lost:
                raise CheckpointError(f"{place.task} was lost with its shard {shard}") from error
            raise
        finally:
            with self._lock:
                self._fetching = None
            control.close()

    def _pace(self, fetch: _Fetch, shard: int, address: str) -> FetchPace:
        # A link to another machine is shared with training, so that fetching leaves most of it.
        spared = not fetch.save.urgent and not on_this_host(parse_address(address)[0])
        if spared:
            fetch.spared[shard] = address
        return FetchPace(address, self._links, self._bucket, self._hurry, capped=spared)

    def close(self) -> None:
        """Wait for the running save; drop queued ones."""
        self._hasten(1)
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Fetch:
    """The fetched parts of one cut, by shard; the manifest is written after the last shard."""

    def __init__(self, save: Save) -> None:
        self.save = save
        self.hosts = {place.shard: place for place in save.placement}
        self.versions = [0] * len(save.plan.shards)
        self.sequences: list[dict[str, list[int]]] = [{} for _ in save.plan.shards]
        self.seconds: dict[int, float] = {}
        self.nbytes: dict[int, int] = {}
        self.spared: dict[int, str] = {}
        """Addresses of servers whose link is shared with training, by shard."""

    def read(self, control: PsControl, shard: int, pace: FetchPace) -> Iterator[BucketImage]:
        """The images of a shard, as fast as the pace lets them come."""
        start_s = time.monotonic()
        buckets = self.save.plan.shards[shard].buckets
        pushes: dict[str, WorkerSequence] = {}
        self.nbytes[shard] = 0
        for image in control.get_cut(
            self.save.timeline,
            shard,
            self.save.step,
            max_bytes=self.save.plan.shards[shard].image_bytes,
            sequences=pushes,
            pace=pace,
            patience_s=STATES * sum(bucket.nbytes for bucket in buckets) / LEAST_RATE,
        ):
            self.versions[shard] = max(self.versions[shard], image.version)
            self.nbytes[shard] += image.nbytes
            yield image
        self.sequences[shard] = sequences_to_json(pushes)
        self.seconds[shard] = time.monotonic() - start_s


def restore(control: PsControl, checkpoint: Checkpoint, plan: Plan, shard: int, timeline: int) -> None:
    """Fill one shard from a checkpoint, whatever plan it was written with.

    If the plan is the same, each worker's last push to the shard is restored too, so that repeated pushes are
    recognized.
    """
    control.restore(timeline, shard, lambda: checkpoint.images(plan, shard), _sequences(checkpoint, plan, shard))


def parameters_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of the parameters and tables in a checkpoint, as hex; "" if it can't be read any more."""
    try:
        params = {spec.name: checkpoint.tensor(spec.name) for spec in checkpoint.tensors if spec.kind in _PARAMETERS}
        return params_sha256({**params, **checkpoint.flat_tables()})
    except CheckpointError as error:
        log.warning("no digest of the parameters: %s", error)
        return ""


_PARAMETERS = (TensorKind.PARAM, TensorKind.FROZEN)


def _sequences(checkpoint: Checkpoint, plan: Plan, shard: int) -> dict[str, WorkerSequence]:
    """The last push of each worker that a shard includes. Replicas whose steps count have the furthest's of all shards.

    They begin there together, so that none uses a batch again.
    """
    every = [checkpoint.sequences(plan, number) for number in range(len(plan.shards))]
    steps = [one.last_seq for own in every for task, one in own.items() if replica_of(task) >= 0]
    furthest = WorkerSequence(0, max(steps, default=0))
    return {task: one if replica_of(task) < 0 else furthest for task, one in every[shard].items()}
