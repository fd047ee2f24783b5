"""Whole clusters that run pipeline_job.py, each task where it is put: their rate, and the bytes on all wires."""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from benchmarks.network import INTERFACE, Lab
from benchmarks.process import HERE, ROOT, Child, ContenderError, Prefix, environment

JOB = ROOT / "benchmarks" / "pipeline_job.py"
RUN_S = 600.0
LOOK_S = 0.02
"""Seconds between two looks at how many bytes were sent."""
SENT = 9
"""Which word of an interface's line in /proc/PID/net/dev: bytes that it has sent."""
AFTER = 2
"""Steps after those that are measured."""
PORT = 2422


@dataclass(frozen=True, kw_only=True)
class Site:
    """A task's place."""

    address: str
    prefix: Prefix = HERE


@dataclass(frozen=True, kw_only=True)
class Sites:
    """Where the tasks run. The chief is beside the first ps."""

    chief: Site
    ps: Sequence[Site]
    workers: Sequence[Site]
    lab: Lab | None = None


def on_hosts(hosts: Lab, *, ps: int, workers: int) -> Sites:
    """A host for each task."""

    def site(host: int, port: int) -> Site:
        return Site(address=f"{hosts.address(host)}:{port}", prefix=hosts.prefix(host))

    return Sites(
        chief=site(1, PORT),
        ps=[site(1 + number, PORT + 1) for number in range(ps)],
        workers=[site(1 + ps + number, PORT) for number in range(workers)],
        lab=hosts,
    )


def on_one_host(prefix: Prefix, port: int, *, ps: int, workers: int) -> Sites:
    """All tasks on one host."""
    free = Site(address="127.0.0.1:0", prefix=prefix)
    chief = Site(address=f"127.0.0.1:{port}", prefix=prefix)
    return Sites(chief=chief, ps=[free] * ps, workers=[free] * workers)


def sent_bytes(pids: Iterable[int]) -> int:
    """Bytes that the hosts of these processes have sent so far, with headers. Raises OSError where one has ended."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()
        total += sum(int(line.split()[SENT]) for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return total


def train(flags: Sequence[str], sites: Sites, *, steps: int, warmup: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds and bytes per step after the warm-up. flags: of the job. more: of `shardline chief` and `worker`.

    Raises ContenderError.
    """
    # Steps follow the last one that counts, as they follow the first: what is sent while the bytes are read is alike.
    total = warmup + steps + AFTER
    spec = {
        "chief": [sites.chief.address],
        "ps": [site.address for site in sites.ps],
        "worker": [site.address for site in sites.workers],
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-bench-")))
        marks = folder / "marks"
        marks.mkdir()
        settings = environment(
            more={"SHARDLINE_JOB_ARGS": shlex.join([*flags, "--steps", str(total), "--marks", str(marks)])}
        )

        def task(role: str, site: Site, index: int, *options: str) -> Child:
            command = [sys.executable, "-m", "shardline", role, "--cluster", json.dumps(spec), "--timeout", "60"]
            command += ["--task", f"{role}/{index}", *options]
            return stack.enter_context(Child(command, prefix=site.prefix, what=f"{role} {index}", env=settings))

        job = ("--job", str(JOB), *more)
        chief = task("chief", sites.chief, 0, *job, "--out", str(folder / "out"))
        servers = [task("ps", site, index) for index, site in enumerate(sites.ps)]
        workers = [task("worker", site, index, *job) for index, site in enumerate(sites.workers)]
        sent = _watch(chief, workers, [child.pid for child in (*servers, *workers)] if sites.lab is not None else [])
        for child in (*workers, chief):
            if code := child.wait(60.0):
                raise ContenderError(f"{child.what} ended with code {code}{child.last_words()}")
        return _found([_times(path) for path in sorted(marks.iterdir())], sent, first=warmup, last=warmup + steps)


def _watch(chief: Child, workers: Sequence[Child], pids: Sequence[int]) -> list[tuple[float, int]]:
    """Until the first worker ends: when, and how many bytes the hosts of these processes had sent."""
    end_s = time.monotonic() + RUN_S
    sent: list[tuple[float, int]] = []
    while not any(child.ended for child in (chief, *workers)):
        if time.monotonic() > end_s:
            raise ContenderError(f"the run goes on after {RUN_S:.0f} s{chief.last_words()}")
        # One that ends meanwhile has no host any more.
        with contextlib.suppress(OSError):
            sent.append((time.monotonic(), sent_bytes(pids)))
        time.sleep(LOOK_S)
    return sent


def _times(path: Path) -> list[float]:
    """When a worker began its part of each step."""
    return [float(line) for line in path.read_text(encoding="ascii").split()]


def _found(
    marks: Sequence[Sequence[float]], sent: Sequence[tuple[float, int]], *, first: int, last: int
) -> dict[str, Any]:
    """Seconds and bytes per step between two steps, as the workers began them on average."""
    if not marks or min(map(len, marks)) <= last:
        raise ContenderError(f"workers began {[len(one) for one in marks]} steps, fewer than {last + 1}")
    start_s, stop_s = (statistics.fmean(one[step] for one in marks) for step in (first, last))
    times, counts = zip(*sent, strict=True)
    start_bytes, stop_bytes = (float(numpy.interp(one, times, counts)) for one in (start_s, stop_s))
    steps = last - first
    return {"median_s": (stop_s - start_s) / steps, "bytes": (stop_bytes - start_bytes) / steps, "steps": steps}
