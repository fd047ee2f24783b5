"""Loaders: processes that read a job's batches ahead, with the bits of reading them without."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from shardline.data import BatchSource
from shardline.errors import JobError, JobExitError, TaskLostError
from shardline.job import Job
from shardline.loading import pool as pools
from shardline.loading.pool import LoaderPool
from tests.support.jobs import make_job
from tests.support.waiting import wait_for


class Noisy:
    """Samples with noise of every generator."""

    def __init__(self, length: int = 48) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, np.ndarray[Any, Any], int]:
        return index + torch.rand(3), np.random.rand(2), index


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Shuffles through a buffer, in another order in each pass."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = list(range(6))
        for item in range(6, 30):
            place = int(torch.randint(6, ()))
            yield buffer[place] + torch.rand(2)
            buffer[place] = item


@contextlib.contextmanager
def pool(job: Job, *, loaders: int = 2, prefetch: int = 2) -> Iterator[LoaderPool]:
    made = LoaderPool(BatchSource(job), loaders=loaders, prefetch=prefetch, accumulate=job.accumulate, who="worker/0")
    try:
        yield made
    finally:
        pids = made.pids
        made.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def flat(batch: Any) -> list[Any]:
    return [part.tolist() for part in (batch if isinstance(batch, list) else [batch])]


PLACES = [
    *((step, replica, microbatch) for step in range(4) for replica in (0, 2) for microbatch in range(2)),
    # After a rollback, with the replica of a worker that was lost.
    *((step, replica, microbatch) for step in range(1, 6) for replica in (0, 1, 2) for microbatch in range(2)),
    (30, 1, 1),
    (30, 1, 1),
]


@pytest.mark.parametrize("dataset", [Noisy, Stream])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_are_those_of_reading_without_loaders_whatever_is_asked_for(
    dataset: Callable[[], Any], prefetch: int
) -> None:
    job = make_job(dataset=dataset, batch_size=2, accumulate=2)
    plain = BatchSource(job)
    expected = [flat(plain.batch(*place)) for place in PLACES]
    with pool(job, loaders=2 if job.samples else 1, prefetch=prefetch) as loaders:
        source = BatchSource(job, ahead=loaders)
        assert [flat(source.batch(*place)) for place in PLACES] == expected


class Broken(Noisy):
    """Raises for one sample, or ends its process there."""

    def __init__(self, does: Callable[[], object]) -> None:
        super().__init__()
        self.does = does

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            self.does()
        return torch.zeros(1)


def raises() -> None:
    raise KeyError("no such picture")


@pytest.mark.parametrize(
    ("does", "error"), [(raises, JobError), (lambda: sys.exit(3), JobExitError)], ids=["an exception", "an exit"]
)
def test_an_error_of_the_data_set_is_the_same_with_loaders(does: Callable[[], object], error: type[JobError]) -> None:
    job = make_job(dataset=Broken(does), batch_size=2)

    def told(source: BatchSource) -> list[str | None]:
        found: list[str | None] = []
        for step in range(8):
            for replica in range(3):
                try:
                    source.batch(step, replica, 0)
                    found.append(None)
                except error as raised:
                    found.append(str(raised))
        return found

    expected = told(BatchSource(job))
    assert sum(sentence is not None for sentence in expected) == 1
    with pool(job) as loaders:
        assert told(BatchSource(job, ahead=loaders)) == expected


def test_a_batch_that_cannot_be_pickled_is_refused_by_its_class() -> None:
    job = make_job(dataset=Noisy(), collate=lambda samples: (one for one in samples))
    with pool(job) as loaders, pytest.raises(JobError, match="a batch of class generator can't be given from a loader"):
        loaders.batch((0, 0, 0))


class Odd(Exception):
    """An object that can be pickled, but not read again."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)


def test_a_batch_that_cannot_be_unpickled_is_refused_with_the_remedy() -> None:
    job = make_job(dataset=Noisy(), collate=lambda samples: Odd("text", 3))
    with (
        pool(job) as loaders,
        pytest.raises(JobError, match=r"it can't be unpickled: TypeError: .*'number'.*or use loaders=0"),
    ):
        loaders.batch((0, 0, 0))


def test_a_batch_that_shared_memory_cannot_hold_is_refused_with_the_remedy() -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return torch.zeros(4096)

    with (
        pool(make_job(dataset=Noisy(), collate=collate)) as loaders,
        pytest.raises(
            JobError, match=r"can't be given from a loader to the worker: File too large; lower --loaders or"
        ),
    ):
        loaders.batch((0, 0, 0))


def test_batches_that_are_kept_keep_no_files_open() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with pool(make_job(dataset=Noisy())) as loaders:
        kept, before = [loaders.batch((0, 0, 0))], files()
        kept += [loaders.batch((step, 0, 0)) for step in range(1, 20)]
        assert len(kept) == 20
        assert files() <= before


@pytest.mark.parametrize("times", [3, 5])
def test_a_batch_waits_while_too_many_files_are_on_their_way_and_is_refused_at_last(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    left, send = iter(range(times)), socket.send_fds

    def full(sock: socket.socket, *arguments: Any) -> int:
        if next(left, None) is not None:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send(sock, *arguments)

    monkeypatch.setattr(socket, "send_fds", full)
    monkeypatch.setattr(pools, "TRIES", 5)
    job = make_job(dataset=Noisy())
    with pool(job, loaders=1) as loaders:
        if times == 3:
            assert flat(loaders.batch((0, 0, 0))) == flat(BatchSource(job).batch(0, 0, 0))
            return
        with pytest.raises(
            JobError, match="can't be taken from loader 0: too many open files; raise the limit, ulimit"
        ):
            loaders.batch((0, 0, 0))


def test_loaders_that_cannot_be_started_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = iter([os.fork])

    def fork() -> int:
        if (real := next(forks, None)) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()

    monkeypatch.setattr(os, "fork", fork)
    with (
        pytest.raises(JobError, match=r"worker/0 can't start loader 1: .*temporarily unavailable; lower loaders"),
        pool(make_job(dataset=Noisy()), loaders=3),
    ):
        pass
    assert not multiprocessing.active_children()


def test_loaders_leave_the_generators_of_the_training_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[union-attr]
    with pool(make_job(dataset=Noisy())) as loaders:
        for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0)):
            loaders.batch(place)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[union-attr]
    assert random.getstate() == before[2]


class Garbage:
    """An object that only the garbage collector finds, as a server of gRPC may be; says in which process it did."""

    def __init__(self, found: mmap.mmap) -> None:
        self.found, self.here, self.cycle = found, os.getpid(), self

    def __del__(self) -> None:
        self.found[0] = 1 if os.getpid() == self.here else 2


@pytest.mark.parametrize("child", ["a loader", "a DataLoader's worker"])
def test_a_forked_child_leaves_its_parents_garbage_alone(child: str) -> None:
    class Collecting(Noisy):
        def __getitem__(self, index: int) -> Any:
            gc.collect()
            return torch.zeros(1)

    found = mmap.mmap(-1, 1)
    gc.disable()
    try:
        Garbage(found)
        if child == "a loader":
            with pool(make_job(dataset=Collecting()), loaders=1) as loaders:
                loaders.batch((0, 0, 0))
        else:
            assert list(DataLoader(Collecting(2), num_workers=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
        assert found[0] == 0
    finally:
        gc.enable()
    gc.collect()
    assert found[0] == 1


class Nested(torch.utils.data.IterableDataset[torch.Tensor]):
    """Read through a DataLoader of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from DataLoader(range(4), batch_size=None, num_workers=1, multiprocessing_context="fork")


def test_a_data_set_may_have_processes_of_its_own() -> None:
    job = make_job(dataset=Nested(), batch_size=2, replicas=1)
    plain = BatchSource(job)
    with pool(job, loaders=1) as loaders:
        for step in range(3):
            assert flat(loaders.batch((step, 0, 0))) == flat(plain.batch(step, 0, 0))


def test_a_loader_whose_data_set_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "END_S", 0.1)
    job = make_job(dataset=Broken(lambda: threading.Event().wait()), batch_size=2, replicas=1)
    order = job.data_order()
    step = next(step for step in range(1, 24) if 17 in order.indices(step, 0, 0))
    with pool(job) as loaders:
        loaders.batch((step - 1, 0, 0))


def test_a_killed_loader_is_replaced_and_nothing_is_lost() -> None:
    job = make_job(dataset=Noisy())
    plain = BatchSource(job)
    with pool(job) as loaders:
        for step in range(12):
            if step % 4 == 1:
                killed = loaders.pids[0]
                os.kill(killed, signal.SIGKILL)
                # While the training computes, which it must not interrupt.
                wait_for(lambda pid=killed: ended(pid), "the loader's end")
            assert flat(loaders.batch((step, 1, 0))) == flat(plain.batch(step, 1, 0))


@pytest.mark.parametrize("number", [0, 1])
def test_a_loader_that_is_killed_with_a_large_batch_on_its_way_loses_nothing(number: int) -> None:
    job = make_job(dataset=Noisy(), collate=lambda samples: [np.full(500_000, samples[0][2]), "text" * 200_000])
    with pool(job) as loaders:
        loaders.batch((0, 0, 0))
        os.kill(loaders.pids[number], signal.SIGKILL)
        for step in range(1, 6):
            array, text = loaders.batch((step, 0, 0))
            assert (array[0], len(text)) == (BatchSource(job).batch(step, 0, 0)[0][0], 800_000)


def test_a_data_set_that_ends_its_loader_every_time_ends_the_job_with_the_place() -> None:
    job = make_job(dataset=Broken(lambda: os._exit(9)), batch_size=2, replicas=1)
    order = job.data_order()
    step = next(step for step in range(24) if 17 in order.indices(step, 0, 0))
    with pool(job) as loaders:
        for earlier in range(step):
            loaders.batch((earlier, 0, 0))
        sentence = rf"loader \d of worker/0 \(process \d+\) ended with exit code 9 while it read step {step}, replica 0"
        with pytest.raises(TaskLostError, match=sentence):
            loaders.batch((step, 0, 0))


def test_signals_for_the_whole_group_leave_loaders_to_their_worker() -> None:
    job = make_job(dataset=Noisy())
    with pool(job) as loaders:
        before = loaders.pids
        loaders.batch((0, 0, 0))
        for pid in before:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for step in range(1, 6):
            loaders.batch((step, 0, 0))
        assert loaders.pids == before


WORKER = """
import os, signal
import torch
from shardline.data import BatchSource
from shardline.loading.pool import LoaderPool
from tests.support.jobs import make_job
from tests.integration.test_loaders import Noisy

job = make_job(dataset=Noisy())
loaders = LoaderPool(BatchSource(job), loaders=2, prefetch=2, accumulate=1, who="worker/0")
loaders.batch((0, 0, 0))
print(*loaders.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_loader_outlives_a_worker_that_was_killed() -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", WORKER], cwd=root, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2

    wait_for(lambda: all(map(ended, pids)), "the loaders' end")


def test_batches_are_read_before_they_are_asked_for_and_no_more_than_that() -> None:
    count = mmap.mmap(-1, 1)

    class Counted(Noisy):
        def __getitem__(self, index: int) -> Any:
            count[0] += 1
            return torch.zeros(1)

    job = make_job(dataset=Counted(), batch_size=4, replicas=1)
    with pool(job, loaders=1, prefetch=3) as loaders:
        loaders.batch((0, 0, 0))
        wait_for(lambda: count[0] == 16, "three batches more")
        loaders.batch((1, 0, 0), end=4)
        loaders.batch((2, 0, 0), end=4)
        loaders.batch((3, 0, 0), end=4)
    # Those before the end alone.
    assert count[0] == 16
