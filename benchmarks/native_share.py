"""Where a parameter server that many workers keep busy spends its processor time: Python, native code, the kernel.

    python -m benchmarks.native_share                    # 16 workers, 16 MB, lane tcp
    python -m benchmarks.native_share --lane shm --megabytes 64

Workers are processes that push and pull without a pause, on the same host, until the measurement is over. Needs perf.
Prints one JSON object: `share` is that of the server's samples by shared object; `native` all but the interpreter's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks import process
from benchmarks.push_pull import LANES, START_S, Work, command

ENDLESS = 1_000_000
"""Steps; the workers are ended when the measurement is over."""
BUSY_S = 3.0
"""Processor seconds of the server after which all workers push."""
FREQUENCY = 499
"""Samples a second and core."""
TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def is_interpreter(name: str) -> bool:
    """Whether a shared object is Python itself; a program without libpython is named python3.11 or alike."""
    return name.startswith(("python", "libpython"))


def shares(report: str) -> dict[str, float]:
    """Share of the samples by shared object, from `perf report --sort dso -t ,`."""
    found: dict[str, float] = {}
    for line in report.splitlines():
        share, _, name = (part.strip() for part in line.partition(","))
        if share.endswith("%") and name:
            key = "kernel" if name.startswith("[kernel") else name
            found[key] = found.get(key, 0.0) + float(share.removesuffix("%")) / 100
    return found


def summary(found: Mapping[str, float]) -> dict[str, Any]:
    """The shares, largest first, and the sum of those that are not the interpreter's."""
    total = sum(found.values())
    if not total:
        raise process.ContenderError("perf has recorded nothing: may it look at this process?")
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return {
        "native": round(sum(share for name, share in ordered if not is_interpreter(name)) / total, 3),
        "share": {name: round(share / total, 3) for name, share in ordered if share >= 0.005 * total},
    }


def record(pid: int, seconds: float) -> dict[str, float]:
    """Samples of a process by shared object. Raises process.ContenderError."""
    if shutil.which("perf") is None:
        raise process.ContenderError("perf is not installed; on Debian: apt-get install linux-perf")
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        data = f"{folder}/perf.data"
        line = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(FREQUENCY), "-p", str(pid), "-o", data]
        done = _run([*line, "--", "sleep", str(seconds)], seconds + 60)
        report = _run(["perf", "report", "-q", "-i", data, "--sort", "dso", "--stdio", "-t", ","], 120)
    if done.returncode or report.returncode:
        raise process.ContenderError(f"perf: {(done.stderr or report.stderr).strip()[-300:]}")
    return shares(report.stdout)


def _run(line: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise process.ContenderError(f"{' '.join(line[:2])} did not end within {timeout_s:.0f} s") from None


def run(work: Work, seconds: float) -> dict[str, Any]:
    """Start everything, measure, end everything. Raises process.ContenderError."""
    with ExitStack() as stack:
        flags = work.flags()
        server = stack.enter_context(process.Child(command("--serve", "127.0.0.1:0", *flags), what="ps/0"))
        address = str(server.read_json(START_S)["address"])
        idle_s = processor_s(server.pid)
        workers = [
            stack.enter_context(
                process.Child(command("--connect", address, "--index", str(index), *flags), what=f"worker/{index}")
            )
            for index in range(work.workers)
        ]
        end_s, pause = time.monotonic() + 2 * START_S, threading.Event()
        while processor_s(server.pid) < idle_s + BUSY_S:
            ended = [worker.what + worker.last_words() for worker in workers if worker.ended]
            if ended or time.monotonic() > end_s:
                raise process.ContenderError(f"the server is not kept busy; ended: {'; '.join(ended) or 'nobody'}")
            pause.wait(0.1)
        used_s, began_s = processor_s(server.pid), time.monotonic()
        found = record(server.pid, seconds)
        cores = (processor_s(server.pid) - used_s) / (time.monotonic() - began_s)
    return {
        "workers": work.workers,
        "megabytes": work.megabytes,
        "lane": work.lane,
        "cores": os.cpu_count(),
        "cores_used_by_ps": round(cores, 2),
        **summary(found),
    }


@click.command(help=__doc__)
@click.option("--workers", type=click.IntRange(1), default=16, show_default=True)
@click.option("--megabytes", type=click.FloatRange(min=0.01), default=16.0, show_default=True)
@click.option("--lane", type=click.Choice(LANES), default="tcp", show_default=True)
@click.option("--seconds", type=click.FloatRange(min=1.0), default=15.0, show_default=True)
def main(workers: int, megabytes: float, lane: str, seconds: float) -> None:
    """Parse, run, print."""
    process.settle_environment()
    work = Work(megabytes=megabytes, lane=lane, workers=workers, steps=ENDLESS)
    print(json.dumps(run(work, seconds), indent=2))


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (process.ContenderError, click.ClickException) as error:
        sys.exit(f"native_share: {error}")
