"""Whole clusters that run pipeline_job.py, each task where it is put: their rate, and the bytes on all wires."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import INTERFACE, Lab
from benchmarks.process import HERE, ROOT, Child, ContenderError, Prefix, environment

JOB = ROOT / "benchmarks" / "pipeline_job.py"
RUN_S = 600.0
LOOK_S = 0.02
"""Seconds between two looks at how far a run is."""
AFTER = 2
"""Steps after those that are measured."""
END_BYTES = 4096
"""Of a log: some steps."""
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


def sent_bytes(hosts: Lab) -> int:
    """Bytes that all hosts have sent so far, headers included."""
    total = 0
    for host in range(1, hosts.hosts + 1):
        command = [*hosts.prefix(host), "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"]
        total += int(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)
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
        settings = environment(more={"SHARDLINE_JOB_ARGS": shlex.join([*flags, "--steps", str(total)])})

        def task(role: str, site: Site, index: int, *options: str) -> Child:
            command = [sys.executable, "-m", "shardline", role, "--cluster", json.dumps(spec), "--timeout", "60"]
            command += ["--task", f"{role}/{index}", *options]
            return stack.enter_context(Child(command, prefix=site.prefix, what=f"{role} {index}", env=settings))

        job = ("--job", str(JOB), *more)
        chief = task("chief", sites.chief, 0, *job, "--out", str(folder / "out"))
        for index, site in enumerate(sites.ps):
            task("ps", site, index)
        workers = [task("worker", site, index, *job) for index, site in enumerate(sites.workers)]
        found = _watch(
            folder / "out" / "logs" / "steps.jsonl", [chief, *workers], sites.lab, first=warmup, last=warmup + steps
        )
        for child in (*workers, chief):
            if code := child.wait(60.0):
                raise ContenderError(f"{child.what} ended with code {code}{child.last_words()}")
    return found


def _watch(path: Path, children: Sequence[Child], hosts: Lab | None, *, first: int, last: int) -> dict[str, Any]:
    """Seconds and bytes per step between two steps."""
    end_s = time.monotonic() + RUN_S
    marks: list[tuple[int, float, int]] = []
    while len(marks) < 2:
        over = next((child for child in children if child.ended), None)
        step = _newest(path)
        if step >= (last if marks else first):
            marks.append((step, time.monotonic(), sent_bytes(hosts) if hosts is not None else 0))
        elif over is not None or time.monotonic() > end_s:
            late = over or children[0]
            raise ContenderError(f"{late.what}: the run is at step {step} of {last}{late.last_words()}")
        time.sleep(LOOK_S)
    (before, start_s, start_bytes), (after, stop_s, stop_bytes) = marks
    steps = after - before
    return {"median_s": (stop_s - start_s) / steps, "bytes": (stop_bytes - start_bytes) / steps, "steps": steps}


def _newest(path: Path) -> int:
    """The newest step of a log, of which only the end is read: the tasks that are measured compute beside this."""
    try:
        with path.open("rb") as log:
            begin = max(0, log.seek(0, os.SEEK_END) - END_BYTES)
            log.seek(begin)
            lines = log.read().splitlines()
    except FileNotFoundError:
        return -1
    # The first may lack its beginning.
    whole = [line for line in lines[begin > 0 :] if line.endswith(b"}")]
    return max((int(json.loads(line)["step"]) for line in whole), default=-1)
