"""A third server joins a running job whose two servers' links are full, and takes a third of the shards."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cluster import JOB, Model
from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, median
from benchmarks.network import Lab, lab
from benchmarks.process import Child, ContenderError, environment

NAME = "growing"
ABOUT = "a third server joins a running job of 4 workers whose 2 servers' links of 150 Mbit/s are full"
RATE, PORT, SHARDS = "150mbit", 2422, 6
WORKERS, FIRST, CHIEF = 4, 4, 8
"""Hosts 1 to 3 have the servers, 4 to 7 the workers, 8 the chief."""
SETTLE_S, START_S = 10.0, 240.0
OURS, BAR = "a third server joins", 1.4


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set on a host for each task."""
    try:
        with lab(CHIEF, RATE) as hosts:
            return collect([Contender(name=OURS, run=lambda: sample(bench, hosts))], bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {OURS: str(error)}


def sample(bench: Bench, hosts: Lab) -> dict[str, Any]:
    """Steps per second with two servers, and from SETTLE_S after the order on with three."""
    model = Model(width=512, layers=7, batch=8, steps=1_000_000, warmup=0)
    tasks = {
        "chief": [f"{hosts.address(CHIEF)}:{PORT}"],
        "ps": [f"{hosts.address(host)}:{PORT}" for host in (1, 2)],
        "worker": [f"{hosts.address(FIRST + index)}:{PORT}" for index in range(WORKERS)],
    }
    more = {**tasks, "ps": [*tasks["ps"], f"{hosts.address(3)}:{PORT}"]}
    settings = environment(more={"SHARDLINE_JOB_ARGS": shlex.join(model.flags())})
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardline-bench-"))) / "out"

        def command(host: int, *words: str, cluster: dict[str, list[str]]) -> Child:
            line = [sys.executable, "-m", "shardline", *words, "--cluster", json.dumps(cluster)]
            return stack.enter_context(Child(line, prefix=hosts.prefix(host), what=words[0], env=settings))

        def task(host: int, name: str, *flags: str, cluster: dict[str, list[str]] = tasks) -> None:
            command(host, name.partition("/")[0], "--task", name, "--insecure-bind", *flags, cluster=cluster)

        # Without replicas of their own, workers beyond the first would have nothing to send.
        job = ("--job", str(JOB), "--set", f"replicas={WORKERS}")
        task(CHIEF, "chief/0", *job, "--out", str(out), "--shards", str(SHARDS), "--no-page")
        for index in (0, 1):
            task(1 + index, f"ps/{index}")
        for index in range(WORKERS):
            task(FIRST + index, f"worker/{index}", *job)
        _pause(lambda: _steps(out) >= bench.scale.warmup, START_S)
        # A server that starts takes a core meanwhile.
        task(3, "ps/2", cluster=more)
        _pause(lambda: "ps/2 joined" in (out / "logs" / "events.jsonl").read_text(encoding="utf-8"), START_S)
        before = _rate(out, bench.scale.link_seconds)
        began_s = time.monotonic()
        code = command(CHIEF, "rebalance", cluster=tasks).wait(START_S)
        moved_s = time.monotonic() - began_s
        if code:
            raise ContenderError(f"rebalance ended with code {code}")
        _pause(lambda: False, SETTLE_S - moved_s, late=False)
        after = _rate(out, bench.scale.link_seconds)
    return {"before": before, "after": after, "ratio": after / before, "moved_s": moved_s}


def _steps(out: Path) -> int:
    """Number of steps that the chief has logged."""
    log = out / "logs" / "steps.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _rate(out: Path, seconds: float) -> float:
    """Steps per second from now on, for 4 times these seconds."""
    first, began_s = _steps(out), time.monotonic()
    _pause(lambda: False, 4 * seconds, late=False)
    return (_steps(out) - first) / (time.monotonic() - began_s)


def _pause(done: Any, limit_s: float, *, late: bool = True) -> None:
    """Wait until done(). Raises ContenderError at the limit, unless that is what is waited for."""
    never, end_s = threading.Event(), time.monotonic() + limit_s
    while not done():
        if time.monotonic() >= end_s:
            if late:
                raise ContenderError(f"the job was not there within {limit_s:.0f} s")
            return
        never.wait(0.1)


def rows(samples: Samples) -> list[Row]:
    """Steps per second after over before."""
    before, after = (median(samples, OURS, name) for name in ("before", "after"))
    return [
        Row(
            work=f"a third server joins: steps/s from {SETTLE_S:.0f} s after the order on",
            value=after,
            unit="steps/s",
            against={} if before is None else {"2 servers": before},
            ratio=median(samples, OURS, "ratio"),
            bar=BAR,
        )
    ]
