"""The checkpointer: what it fetches, what it finds again, and what it gives back to the servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shardline.checkpoint import Checkpoint, CheckpointStore
from shardline.checkpoint.loaders import LoaderStates
from shardline.core.image import BucketImage, WorkerSequence
from shardline.core.placement import Placement
from shardline.core.plan import Plan, make_plan
from shardline.core.spec import ConsistencySpec, JobSpec
from shardline.errors import CheckpointError, UnreachableError
from shardline_chief.io.checkpointer import Checkpointer, restore
from shardline_chief.rules.actions import Save, Saved
from tests.support.checkpoints import SHARD_0, assert_same_images, cut_of, flip_byte, images_of, job_of

PATIENCE_S = 20.0
PUSHES: dict[int, dict[str, WorkerSequence]] = {
    0: {"worker/0": WorkerSequence((2 << 32) | 1, 7), "worker/1": WorkerSequence((2 << 32) | 2, 5)},
    1: {"worker/0": WorkerSequence((2 << 32) | 1, 6)},
}


class Server:
    """A ps as the checkpointer sees it: cuts of any step, and what was restored."""

    def __init__(self, plan: Plan, *, versions: Mapping[int, int] | None = None) -> None:
        self.plan = plan
        self.versions = versions
        self.restored: dict[str, Any] = {}
        self.reached = threading.Event()
        """Somebody asked for a cut."""
        self.held = threading.Event()
        """Cuts come only when this is set, or the connection is closed."""
        self.held.set()

    def get_cut(
        self,
        timeline: int,
        shard: int,
        step: int,
        *,
        max_bytes: int,
        sequences: dict[str, WorkerSequence],
        pace: Callable[[int], None],
        patience_s: float,
    ) -> Iterator[BucketImage]:
        self.reached.set()
        assert self.held.wait(PATIENCE_S)
        version = self.versions[shard] if self.versions else None
        yield from images_of(self.plan, step, version=version)[shard]
        sequences.update(PUSHES[shard])

    def restore(
        self,
        timeline: int,
        shard: int,
        images: Callable[[], Iterable[BucketImage]],
        sequences: Mapping[str, WorkerSequence],
    ) -> None:
        self.restored = {"images": list(images()), "sequences": sequences}

    def close(self) -> None:
        """Nothing to close."""


def save_of(job: JobSpec, plan: Plan, step: int) -> Save:
    placement = tuple(Placement(shard=n, task=f"ps/{n}", address="nowhere:1") for n in range(len(plan.shards)))
    return Save(step=step, timeline=(3 << 32) | 1, plan=plan, job=job, placement=placement, cursor={"done": [[0, 4]]})


def saved(checkpointer: Checkpointer, save: Save) -> Saved:
    future: Future[Saved] = Future()
    checkpointer.submit(save, future.set_result)
    return future.result(PATIENCE_S)


def found(checkpointer: Checkpointer) -> tuple[Checkpoint | None, str]:
    future: Future[tuple[Checkpoint | None, str]] = Future()
    checkpointer.find((), lambda checkpoint, error: future.set_result((checkpoint, error)))
    return future.result(PATIENCE_S)


def make(tmp_path: Path, server: Server, keep: int = 9) -> Checkpointer:
    return Checkpointer(CheckpointStore(tmp_path, keep), lambda task, address: server, term=3)  # type: ignore[arg-type, return-value]


def test_an_asynchronous_checkpoint_holds_versions_and_push_numbers_of_each_shard_and_gives_them_back(
    tmp_path: Path,
) -> None:
    job = job_of(consistency=ConsistencySpec(mode="async"))
    plan = make_plan(job.tensors, 2)
    server = Server(plan, versions={0: 12, 1: 11})
    checkpointer = make(tmp_path, server)
    try:
        assert saved(checkpointer, save_of(job, plan, 4)).error == ""
    finally:
        checkpointer.close()
    checkpoint = CheckpointStore(tmp_path, 1).newest_valid()
    assert checkpoint.manifest.versions == (12, 11)
    for shard in (0, 1):
        restore(server, checkpoint, plan, shard, (3 << 32) | 2)  # type: ignore[arg-type]
        assert server.restored["sequences"] == PUSHES[shard]
        assert_same_images(server.restored["images"], images_of(plan, 4, version=(12, 11)[shard])[shard])
    # Numbers belong to a shard, so another plan's shards have none of them.
    other = make_plan(job.tensors, 1)
    restore(server, checkpoint, other, 0, (3 << 32) | 2)  # type: ignore[arg-type]
    assert server.restored["sequences"] == {} and {image.version for image in server.restored["images"]} == {12}


def test_a_checkpoint_has_the_states_of_scripts_loaders_and_waits_for_one_that_is_late(tmp_path: Path) -> None:
    job = job_of()
    plan = make_plan(job.tensors, 2)
    server = Server(plan)
    checkpointer = make(tmp_path, server)
    loaders, result = checkpointer.store.loaders, Future[Saved]()
    try:
        loaders.keep("worker/0-0", 3, "a")
        loaders.keep("worker/1-0", 2, "old")
        checkpointer.submit(save_of(job, plan, 3), result.set_result)
        assert not server.reached.wait(0.1)
        loaders.keep("worker/1-0", 3, "b")
        assert result.result(PATIENCE_S).error == ""
    finally:
        checkpointer.close()
    store = CheckpointStore(tmp_path, 1)
    found = [store.loader_state(name, step) for name in ("worker/0-0", "worker/1-0", "worker/2-0") for step in (3, 4)]
    assert found == ["a", "", "b", "", "", ""]


def test_states_of_any_text_fit_a_manifest_and_go_once_it_has_them_and_who_is_gone_is_named_and_waited_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.checkpoint.loaders.PATIENCE_S", 0.01)
    job = job_of()
    plan = make_plan(job.tensors, 2)
    checkpointer = make(tmp_path, Server(plan))
    loaders, store = checkpointer.store.loaders, checkpointer.store
    large = {f"worker/{number}-0": 1_000_000 * text for number, text in enumerate('{[,"')}
    try:
        loaders.keep("worker/9-0", 0, "gone")
        for step in (3, 4):
            for name, state in large.items():
                loaders.keep(name, step, state)
        for step in (3, 4):
            assert saved(checkpointer, save_of(job, plan, step)).error == ""
            assert [bool(loaders.find("worker/0-0", number)) for number in (3, 4)] == [False, step == 3]
            assert {name: store.loader_state(name, step) for name in large} == large
    finally:
        checkpointer.close()
    told = [record.getMessage() for record in caplog.records if "loaders" in record.getMessage()]
    assert told == ["the checkpoint of step 3 is without the states of the loaders worker/9-0"]


def test_the_states_of_all_loaders_together_are_limited_and_the_oldest_go_first() -> None:
    states = LoaderStates(most_bytes=1000)
    for step in (10, 20):
        for name in ("worker/0-0", "worker/1-0"):
            states.keep(name, step, f"{name} {step}")
    kept = [states.find(name, step) for step in (10, 20) for name in ("worker/0-0", "worker/1-0")]
    assert kept == ["", "", "worker/0-0 20", "worker/1-0 20"]
    # Handed over again, it takes no more.
    states.keep("worker/0-0", 20, "again")
    assert states.of(20).keys() == {"worker/0-0", "worker/1-0"}
    assert states.find("worker/0-0", 20) == "again"


def test_push_numbers_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    job = job_of(consistency=ConsistencySpec(mode="async"))
    plan = make_plan(job.tensors, 2)
    for step, value in enumerate(({"worker/0": [1, 2]}, [{}], [{"worker/0": [1, -2]}, {}], [{"w": [True, 2]}, {}])):
        path = CheckpointStore(tmp_path, 9).commit(cut_of(job, step=step, plan=plan, extra={"sequences": value}))
        with pytest.raises(CheckpointError, match="sequences in manifest"):
            Checkpoint(path).sequences(plan, 0)


def test_the_newest_whole_checkpoint_is_found_after_the_save_under_way_and_past_damaged_ones(tmp_path: Path) -> None:
    job = job_of()
    plan = make_plan(job.tensors, 2)
    server = Server(plan)
    checkpointer = make(tmp_path, server)
    try:
        assert found(checkpointer) == (None, "")
        for step in (1, 2):
            assert saved(checkpointer, save_of(job, plan, step)).error == ""
        server.reached.clear()
        server.held.clear()
        told: list[int] = []
        looked: Future[tuple[Checkpoint | None, str]] = Future()
        checkpointer.submit(save_of(job, plan, 3), lambda result: told.append(result.step))
        assert server.reached.wait(PATIENCE_S)
        checkpointer.find((), lambda checkpoint, error: looked.set_result((checkpoint, error)))
        server.held.set()
        newest, error = looked.result(PATIENCE_S)
        assert newest is not None and (newest.step, error, told) == (3, "", [3])
        flip_byte(tmp_path / "step-00000003" / SHARD_0, 900)
        newest, _ = found(checkpointer)
        assert newest is not None and newest.step == 2
        assert "step-00000003" in newest.warnings[0] and "is corrupt" in newest.warnings[0]
        for step in (1, 2):
            flip_byte(tmp_path / f"step-0000000{step}" / SHARD_0, 900)
        newest, error = found(checkpointer)
        assert newest is None and "has no complete checkpoint" in error
    finally:
        checkpointer.close()


@pytest.mark.parametrize("error", [ValueError("Cannot invoke RPC on closed channel!"), UnreachableError("cancelled")])
def test_a_save_whose_server_is_lost_meanwhile_ends_with_that_sentence_and_is_no_defect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    job = job_of()
    plan = make_plan(job.tensors, 2)

    class Lost(Server):
        def get_cut(self, *place: Any, **more: Any) -> Iterator[BucketImage]:
            self.reached.set()
            assert self.held.wait(PATIENCE_S)
            raise error

        def close(self) -> None:
            self.held.set()

    server = Lost(plan)
    server.held.clear()
    checkpointer = make(tmp_path, server)
    result: Future[Saved] = Future()
    looked: Future[str] = Future()
    try:
        checkpointer.submit(save_of(job, plan, 3), result.set_result)
        assert server.reached.wait(PATIENCE_S)
        checkpointer.find(("ps/0",), lambda checkpoint, why: looked.set_result(why))
        assert result.result(PATIENCE_S).error == "ps/0 was lost with its shard 0"
        assert looked.result(PATIENCE_S) == ""
        # Of a server that nobody gave up it stays what it was.
        again = saved(checkpointer, save_of(job, plan, 4))
        assert str(error) in again.error and "was lost" not in again.error
    finally:
        checkpointer.close()
    defects = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in defects] == (
        ["checkpoint of step 4 failed"] if isinstance(error, ValueError) else []
    )
