"""Checkpoints of living servers: a slow disk holds nobody up, and a capped fetch takes its time and no more."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shardline.checkpoint import CheckpointStore
from shardline.checkpoint.files import Files
from shardline.core.status import HeldCut
from shardline.rpc.client import PsControl
from shardline.testing import reference
from shardline_chief.io.checkpointer import Checkpointer
from shardline_chief.io.pacing import FetchPace, Links, TokenBucket
from shardline_chief.rules.actions import Save, Saved
from tests.support.cluster import PATIENCE_S, Cluster, assert_same_end
from tests.support.jobs import Rich, make_job
from tests.support.waiting import wait_for


class SlowFiles(Files):
    """A disk that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.go, self.reached = threading.Event(), threading.Event()

    def write_some(self, fd: int, view: memoryview) -> int:
        self.reached.set()
        assert self.go.wait(PATIENCE_S)
        return super().write_some(fd, view)

    def sync(self, fd: int) -> None:
        """No real one: what is slow here is said by `go`."""


class Watched(threading.Event):
    """Counts who waits for it."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return super().wait(timeout)


def save_of(cluster: Cluster, step: int) -> Save:
    return Save(
        step=step,
        timeline=cluster.timeline,
        plan=cluster.plan,
        job=cluster.spec,
        placement=cluster.placement,
        cursor={},
    )


def held(cluster: Cluster, shard: int) -> list[HeldCut]:
    return list(cluster.controls[shard].status().shards[0].cuts)


def test_a_disk_that_hangs_stops_neither_training_nor_answers_and_cuts_are_left_out_until_it_goes_on(
    tmp_path: Path,
) -> None:
    job = make_job("momentum", model=Rich, replicas=2, steps=14)
    files = SlowFiles()
    with Cluster(job, ps=2, cut_every=2, bucket_bytes=512) as cluster:

        def connect(task: str, address: str) -> PsControl:
            return PsControl(task, address, cluster.timeouts, term=0, chief_uuid="")

        store = CheckpointStore(tmp_path, 9, files=files)
        checkpointer = Checkpointer(store, connect, term=1)
        saves: dict[int, Future[Saved]] = {2: Future(), 4: Future()}
        try:
            cluster.train([[0], [1]], steps=2)
            checkpointer.submit(save_of(cluster, 2), saves[2].set_result)
            assert files.reached.wait(PATIENCE_S)
            # The writer hangs from here on.
            cluster.train([[0], [1]], steps=10)
            for shard in range(2):
                status = cluster.controls[shard].status().shards[0]
                assert status.step_min == 10
                assert [(cut.step, cut.complete, cut.skipped) for cut in status.cuts] == [
                    (2, True, False),
                    (4, True, False),
                    (6, False, True),
                    (8, False, True),
                    (10, False, True),
                ]
            checkpointer.submit(save_of(cluster, 4), saves[4].set_result)
            assert not saves[2].done() and not saves[4].done()
            files.go.set()
            for step, future in saves.items():
                assert future.result(PATIENCE_S).error == "", step
                for control in cluster.controls:
                    control.release(cluster.timeline, step)
        finally:
            files.go.set()
            checkpointer.close()
        cluster.train([[0], [1]], steps=14)
        # What was left out stays so; what came after the disk went on is there again.
        assert [(cut.step, cut.skipped) for cut in held(cluster, 0)][-2:] == [(12, False), (14, False)]
        for step in saves:
            expected = reference(job, step)
            checkpoint = store.open(step)
            for name, value in {**expected.params, **expected.buffers}.items():
                assert bool((checkpoint.tensor(name) == value).all()), (step, name)
        assert_same_end(cluster.state(), reference(job, 14))


def test_a_fetch_that_is_given_up_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(make_job("adam", model=Rich), bucket_bytes=512) as cluster:
        control = cluster.controls[0]
        control.cut(cluster.timeline, 0)
        calls: list[Any] = []
        stub = control._stub  # no other way: the call is gRPC's, and nobody else is given it
        method = stub.GetCut

        def get_cut(request: Any, timeout: float) -> Any:
            calls.append(method(request, timeout=timeout))
            return calls[-1]

        monkeypatch.setattr(stub, "GetCut", get_cut)
        images = control.get_cut(cluster.timeline, 0, 0, max_bytes=1 << 20)
        next(images)
        images.close()
        # gRPC frees a call, with all that it holds, when nothing of it is due.
        assert len(calls) == 1 and not calls[0]._state.due


def test_a_capped_fetch_of_a_real_server_takes_its_bytes_at_the_capped_rate_unless_somebody_waits_for_it() -> None:
    with Cluster(make_job("adam", model=Rich), bucket_bytes=512) as cluster:
        control, address = cluster.controls[0], cluster.hosts[0].address
        control.cut(cluster.timeline, 0)
        nbytes = sum(image.nbytes for image in control.get_cut(cluster.timeline, 0, 0, max_bytes=1 << 20))

        class SlowLinks(Links):
            def cap(self, address: str) -> float:
                """Such that the whole of it takes a quarter of a second."""
                return 4.0 * nbytes

        def fetch(hurry: threading.Event) -> float:
            pace = FetchPace(address, SlowLinks(), TokenBucket(burst=0), hurry, capped=True)
            start_s = time.monotonic()
            for _ in control.get_cut(cluster.timeline, 0, 0, max_bytes=1 << 20, pace=pace):
                pass
            return time.monotonic() - start_s

        assert fetch(threading.Event()) >= 0.24
        hurry = Watched()
        hurry.set()
        fetch(hurry)
        assert hurry.waits == 0


def test_a_fetch_from_a_server_that_stands_still_ends_when_it_is_known_to_be_lost(tmp_path: Path) -> None:
    """A paused process keeps its connections, so that nothing but the chief's word ends what waits for it."""
    job = make_job("momentum", model=Rich, replicas=2, steps=14)
    with Cluster(job, ps=2, cut_every=2, bucket_bytes=512) as cluster:

        class Noted(PsControl):
            def get_cut(self, *arguments: Any, **settings: Any) -> Any:
                fetching.add(self.peer.task)
                return super().get_cut(*arguments, **settings)

        def connect(task: str, address: str) -> PsControl:
            return Noted(task, address, cluster.timeouts, term=0, chief_uuid="")

        fetching: set[str] = set()
        checkpointer = Checkpointer(CheckpointStore(tmp_path, 9), connect, term=1)
        reached, go = threading.Event(), threading.Event()
        save: Future[Saved] = Future()
        looked: Future[tuple[object, str]] = Future()
        try:
            cluster.train([[0], [1]], steps=2)
            loop = cluster.hosts[1].server.loop
            loop.call_soon_threadsafe(reached.set)
            loop.call_soon_threadsafe(go.wait, PATIENCE_S)
            assert reached.wait(PATIENCE_S)
            checkpointer.submit(save_of(cluster, 2), save.set_result)
            wait_for(lambda: "ps/1" in fetching, "the fetch")
            began_s = time.monotonic()
            checkpointer.find(("ps/1",), lambda checkpoint, error: looked.set_result((checkpoint, error)))
            assert looked.result(PATIENCE_S) == (None, "")
            # Its own deadline is ten times --timeout.
            assert time.monotonic() - began_s < cluster.timeouts.total_s / 2
            assert "ps/1" in save.result(PATIENCE_S).error
        finally:
            go.set()
            checkpointer.close()
