"""The processes of a sweep: forks of one that has imported torch and run the job file, one model in each."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection
from multiprocessing.context import ForkProcess

import torch

from shardline.cli.process_exits import describe_code
from shardline.errors import UsageError
from shardline.host import files
from shardline.host.forkserver import CAN_FORK, PR_SET_PDEATHSIG, prctl
from shardline.host.process import check_device, usable_cores
from shardline_lab.sweep.member import SweepMember

END_S = 10.0
"""Time for a process to end at SIGTERM."""
WAKE_S = 3600.0
LOG = "log.txt"
_FORK = multiprocessing.get_context("fork")


def devices(name: str, parallel: int | None, threads: int) -> list[str]:
    """The device of each process. name: as --device. Raises UsageError if there is none of that name.

    parallel: number of processes; None = one for each GPU, or as many as have a core for each of their threads.
    """
    if name == "cpu":
        return [name] * (parallel or max(1, usable_cores() // threads))
    # In another process: one that has asked for GPUs can't be forked any more.
    with ProcessPoolExecutor(1, mp_context=_FORK) as pool:
        count = pool.submit(check_device, name).result()
    found = [f"cuda:{index}" for index in range(count)] if name == "cuda" else [name]
    return list(itertools.islice(itertools.cycle(found), parallel or len(found)))


def train(members: Iterable[SweepMember], share: float, places: Sequence[str]) -> Generator[SweepMember, None, None]:
    """Train all up to a share of their steps, as many at a time as there are places; yields each as it ends.

    Those that have come so far already are not started. An exception, such as Ctrl-C, ends all processes.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError("the job file uses CUDA as it is read, so its models can't have processes; use it in model()")
    waiting = []
    for member in members:
        found = member.history()
        if not found.failure and (found.stopped or found.step >= member.steps(share)):
            member.found = found.until(member.steps(share))
            yield member
        else:
            waiting.append(member)
    free, running = list(places), dict[int, tuple[SweepMember, str, ForkProcess]]()
    with _ending(running):
        while waiting or running:
            while waiting and free:
                member, device = waiting.pop(0), free.pop(0)
                process = _FORK.Process(target=_begin, args=(member, device, share), daemon=True)
                process.start()
                running[process.sentinel] = member, device, process
            for ended in connection.wait(list(running), WAKE_S):
                assert isinstance(ended, int)
                member, device, process = running.pop(ended)
                process.join(END_S)
                free.append(device)
                member.found = member.history().until(member.steps(share))
                if process.exitcode:
                    member.found.failure = f"its process {describe_code(process.exitcode)}; see {member.folder / LOG}"
                yield member


@contextlib.contextmanager
def _ending(running: dict[int, tuple[SweepMember, str, ForkProcess]]) -> Iterator[None]:
    """End what runs at the end of the block, also at SIGTERM."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        processes = [process for _, _, process in running.values()]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()


def _begin(member: SweepMember, device: str, share: float) -> None:
    """Be a model's process: what it prints goes into its folder, and it ends with the process that has forked it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if CAN_FORK:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    member.folder.mkdir(parents=True, exist_ok=True)
    log = files.append_fd(member.folder / LOG)
    for output in (1, 2):
        os.dup2(log, output)
    member.train(device, share)
