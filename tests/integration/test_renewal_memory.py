"""Servers that go on living make the shards of a new history when nobody holds those of the one before any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from shardline.client.exchange.shard_exchange import Restart
from shardline.core.plan import ShardSpec
from shardline.errors import UnreachableError
from shardline.storage.publication import Publication
from shardline_ps import servicer
from tests.support.cluster import TIMELINE, Cluster, Ps
from tests.support.jobs import Rich, Wide, make_job
from tests.support.standbys import Protected
from tests.support.waiting import wait_for

NEXT = TIMELINE + 1


class Watch:
    """What of a server's shards and standbys of now is in memory whenever it makes a new one."""

    def __init__(self, host: Ps) -> None:
        store = host.store
        self._parts: list[tuple[str, weakref.ref[Any]]] = []
        for name, shard in [
            *((f"shard {number}", shard) for number, shard in store.shards.items()),
            *((f"standby {number}", standby.shard) for number, standby in store.standbys.items()),
        ]:
            self._parts += [(name, weakref.ref(part)) for part in (shard, shard.publication, *shard.buckets)]
        self._make, store.make_publication = store.make_publication, self._watched
        self.seen: list[list[str]] = []
        """Names of what was alive, by shard made."""

    def _watched(self, spec: ShardSpec, sync: bool) -> Publication:
        self.seen.append([name for name, part in self._parts if part() is not None])
        return self._make(spec, sync)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is freed is freed by its last user, not when a cycle is found."""

    gc.collect()
    gc.disable()
    with monkeypatch.context() as patched:
        patched.setattr(servicer.gc, "collect", lambda: 0)
        yield
    gc.enable()


def renewed(cluster: Cluster) -> list[list[list[str]]]:
    """Configure every server anew while a worker waits for a step; what was alive as shards were made, by server."""
    worker, lacking = cluster.worker(0), cluster.spec.replicas - 1
    watches: list[Watch] = []

    def train() -> None:
        # Its step lacks the last replica for ever. A lane that ends under it may be heard of first.
        with pytest.raises((Restart, UnreachableError)):
            worker.run(range(lacking), 1)

    def change() -> None:
        wait_for(
            lambda: all(bucket.contributions.mask for shard in cluster.shards for bucket in shard.buckets),
            "pushes to be counted",
        )
        wait_for(lambda: all(host.servicer.calls.open for host in cluster.hosts), "pulls to wait")
        watches.extend(map(Watch, cluster.hosts))
        cluster.timeline = NEXT
        for number, control in enumerate(cluster.controls):
            control.configure(cluster.configuration(number))

    cluster.together([train, change])
    return [watch.seen for watch in watches]


@pytest.mark.parametrize("lane", ["grpc", "tcp", "shm"])
def test_a_worker_that_waits_holds_no_old_shard_while_new_ones_are_made(lane: str) -> None:
    job = make_job("adam", model=Wide, steps=2)
    with Cluster(job, ps=2, bucket_bytes=1 << 18, lane=lane) as cluster:
        assert renewed(cluster) == [[[]], [[]]]


@pytest.mark.parametrize("clip_norm", [0.0, 0.05], ids=["eager", "voted"])
def test_streams_of_standbys_hold_no_old_shard_while_new_ones_are_made(clip_norm: float) -> None:
    job = make_job("adam", model=Rich, steps=2, clip_norm=clip_norm)
    with Protected(job, ps=2, bucket_bytes=512) as cluster:
        cluster.await_synced()
        assert renewed(cluster) == [[[]], [[]]]
