"""Many workers on one parameter server for minutes: does its memory stay where it is, and its threads, and its files?

    make load                                            # 64 workers, 10 minutes
    python -m benchmarks.load --workers 8 --minutes 0.1

Workers are threads of some light processes, each with connections, lanes and push numbers of its own: for the server
there is no difference. Each pushes at a pace and pulls what it gets back. Writes benchmarks/results/load.json and fails
where a worker failed or the server grew.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks import process
from benchmarks.machine import describe
from benchmarks.push_pull import LANES, START_S, Work, command

RESULTS = Path(__file__).resolve().parent / "results"
SAMPLE_S = 5.0
GROWTH_MB = 16.0
"""What the server may hold more in the last third than in the first: allocators are not exact."""


def of_process(pid: int) -> dict[str, float]:
    """Resident memory in MB, threads and open files of a process, as Linux tells them."""
    folder = Path(f"/proc/{pid}")
    facts = dict(line.split(":", 1) for line in (folder / "status").read_text(encoding="ascii").splitlines())
    return {
        "mb": round(int(facts["VmRSS"].split()[0]) / 1024, 1),
        "threads": int(facts["Threads"]),
        "files": len(list((folder / "fd").iterdir())),
    }


def some_workers(work: Work, address: str, first: int, count: int, *, seconds: float, pace: float) -> dict[str, Any]:
    """Workers [first, first + count) as threads of this process; worker 0 sends the first values."""
    from benchmarks.data_plane import paced_worker

    found: list[dict[str, Any]] = []
    errors: list[str] = []

    def run(index: int) -> None:
        try:
            found.append(paced_worker(work, address, index, seconds=seconds, pace=pace))
        except Exception as error:
            errors.append(f"worker/{index}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(first, first + count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 2 * START_S)
    return {
        "pushes": sum(item["pushes"] for item in found),
        "workers": len(found),
        "slowest_s": max((item["slowest_s"] for item in found), default=0.0),
        "staleness_max": max((item["staleness_max"] for item in found), default=0),
        "lanes": sorted({item["lane"] for item in found}),
        "errors": errors,
    }


def run(work: Work, *, processes: int, seconds: float, pace: float) -> dict[str, Any]:
    """The whole of it; figures of the server over time and of the workers."""
    each = [work.workers // processes + (number < work.workers % processes) for number in range(processes)]
    samples: list[dict[str, float]] = []
    with ExitStack() as stack:
        server = stack.enter_context(process.Child(command("--serve", "127.0.0.1:0", *work.flags()), what="ps/0"))
        address = str(server.read_json(START_S)["address"])
        clients, first = [], 0
        for number, count in enumerate(each):
            line = [sys.executable, "-m", "benchmarks.load", "--connect", address, "--first", str(first)]
            line += ["--workers", str(count), "--minutes", str(seconds / 60), "--pace", str(pace)]
            line += ["--megabytes", str(work.megabytes), "--lane", work.lane]
            clients.append(stack.enter_context(process.Child(line, what=f"workers of process {number}")))
            first += count
        ended = threading.Event()
        began_s = time.monotonic()

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                samples.append({"s": round(time.monotonic() - began_s, 1), **of_process(server.pid)})

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            found = process.read_all([*clients], seconds + 4 * START_S)
        finally:
            ended.set()
            watcher.join(2 * SAMPLE_S)
        server.terminate()
        end = process.read_all([server], START_S)[0]
    # While the first pushes come, connections and staging are being made: that is no growth.
    steady = [sample for sample in samples if sample["s"] > min(60.0, seconds / 4)] or samples
    third = max(1, len(steady) // 3)
    early, late = steady[:third], steady[-third:]

    def mean(part: list[dict[str, float]], what: str) -> float:
        return round(sum(sample[what] for sample in part) / len(part), 1)

    return {
        "workers": sum(item["workers"] for item in found),
        "lane": ", ".join(sorted({lane for item in found for lane in item["lanes"]})),
        "megabytes": work.megabytes,
        "seconds": round(seconds, 1),
        "pushes": sum(item["pushes"] for item in found),
        "pushes_per_s": round(sum(item["pushes"] for item in found) / seconds, 1),
        "slowest_push_s": max(item["slowest_s"] for item in found),
        "staleness_max": max(item["staleness_max"] for item in found),
        "ps": {
            "mb_first_third": mean(early, "mb"),
            "mb_last_third": mean(late, "mb"),
            "mb_max": max(sample["mb"] for sample in samples),
            "threads_max": max(sample["threads"] for sample in samples),
            "files_max": max(sample["files"] for sample in samples),
            "cpu_s": end["cpu_s"],
        },
        "errors": [error for item in found for error in item["errors"]],
        "samples": samples,
    }


@click.command(help=__doc__)
@click.option("--workers", type=click.IntRange(1), default=64, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True, help="That the workers share.")
@click.option("--minutes", type=click.FloatRange(min=0.01), default=10.0, show_default=True)
@click.option("--pace", type=click.FloatRange(min=0.01), default=1.0, show_default=True, help="Pushes a second, each.")
@click.option("--megabytes", type=click.FloatRange(min=0.01), default=1.0, show_default=True)
@click.option("--lane", type=click.Choice(LANES), default="tcp", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--connect", hidden=True)
@click.option("--first", type=int, default=0, hidden=True)
def main(
    workers: int,
    processes: int,
    minutes: float,
    pace: float,
    megabytes: float,
    lane: str,
    out: Path,
    connect: str | None,
    first: int,
) -> None:
    """Parse, run, print."""
    process.settle_environment()
    work = Work(megabytes=megabytes, lane=lane, workers=workers)
    seconds = minutes * 60
    if connect is not None:
        print(json.dumps(some_workers(work, connect, first, workers, seconds=seconds, pace=pace)), flush=True)
        return
    found = run(work, processes=min(processes, workers), seconds=seconds, pace=pace)
    out.mkdir(parents=True, exist_ok=True)
    (out / "load.samples.json").write_text(json.dumps(found.pop("samples")) + "\n", encoding="utf-8")
    (out / "load.json").write_text(json.dumps({"machine": describe(), **found}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    if found["errors"] or found["workers"] < workers:
        sys.exit(f"load: {len(found['errors'])} of {workers} workers failed")
    ps = found["ps"]
    if ps["mb_last_third"] > ps["mb_first_third"] + GROWTH_MB:
        sys.exit(f"load: the server grew from {ps['mb_first_third']} to {ps['mb_last_third']} MB")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except (process.ContenderError, click.ClickException) as error:
        sys.exit(f"load: {error}")
