"""Push and pull between two hosts on links of 10 Gbit/s to 100 Mbit/s, each beside what iperf3 moves there."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Sample, Samples, median
from benchmarks.network import Lab, iperf3, lab
from benchmarks.process import Child, ContenderError, environment

NAME = "links"
ABOUT = "push and pull between two hosts beside iperf3 on the same link"
RATES = {"10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
FASTEST = "10 Gbit/s"
"""Where push and pull at once have a bar too."""
WAYS = ("push", "pull", "both")
LANES = ("auto", "grpc")
BAR = 0.95
PORT = 2222
PS, WORKER = 1, 2
"""Hosts."""


def lane_name(lane: str, rate: str) -> str:
    """Name of our contender."""
    return f"{lane} lane, {rate}"


def iperf_name(rate: str) -> str:
    """Name of the measure."""
    return f"iperf3, {rate}"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set; the hosts are made anew for each rate."""
    samples: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for rate, shaped in RATES.items():
        try:
            with lab(2, shaped) as hosts:
                found, failed = collect(contenders(bench, hosts, rate), bench.scale.repeats, bench.say)
        except ContenderError as error:
            failures[iperf_name(rate)] = str(error)
            bench.say(f"  {rate}: {error}")
            continue
        samples.update(found)
        failures.update(failed)
    return samples, failures


def contenders(bench: Bench, hosts: Lab, rate: str) -> list[Contender]:
    """iperf3 and `shardline bench net` on one pair of hosts."""

    def call(lane: str) -> Callable[[], dict[str, Any]]:
        return lambda: bench_net(bench, hosts, lane)

    def all_ways() -> dict[str, Any]:
        seconds = bench.scale.link_seconds
        return {
            "push": iperf3(hosts, WORKER, PS, seconds),
            "pull": iperf3(hosts, PS, WORKER, seconds),
            "both": iperf3(hosts, WORKER, PS, seconds, both=True),
        }

    ours = [Contender(name=lane_name(lane, rate), run=call(lane)) for lane in LANES]
    return [Contender(name=iperf_name(rate), run=all_ways), *ours]


def bench_net(bench: Bench, hosts: Lab, lane: str) -> dict[str, Any]:
    """One `shardline bench net` between the hosts. Raises ContenderError."""
    cluster = json.dumps(
        {
            "chief": [f"{hosts.address(PS)}:{PORT + 1}"],
            "ps": [f"{hosts.address(PS)}:{PORT}"],
            "worker": [f"{hosts.address(WORKER)}:{PORT}"],
        }
    )
    command = [sys.executable, "-m", "shardline", "bench", "net", "--cluster", cluster, "--lane", lane]
    command += ["--megabytes", str(bench.scale.megabytes), "--seconds", str(bench.scale.link_seconds)]
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        path = Path(folder) / "net.json"
        with Child([*command, "--serve"], prefix=hosts.prefix(PS), what="bench net --serve", env=environment()):
            client = [*command, "--json", str(path)]
            end_s = time.monotonic() + 30.0
            while True:
                with Child(client, prefix=hosts.prefix(WORKER), what="bench net", env=environment()) as child:
                    code = child.wait(900.0)
                # The other side needs a moment to listen.
                if code == 0 or time.monotonic() > end_s:
                    break
                time.sleep(0.2)
        if code:
            raise ContenderError(f"bench net ended with code {code}")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {
        "push": found["lane"]["push_bytes_per_s"],
        "pull": found["lane"]["pull_bytes_per_s"],
        "both": 2 * found["lane"]["nbytes"] / found["lane"]["both_s"],
        "lane": found["lane"]["lane"],
        "fallbacks": found["lane"]["fallbacks"],
        "net": found,
    }


def rows(samples: Samples) -> list[Row]:
    """Goodput of push and of pull over iperf3's in the same direction, and of both at once."""
    return [
        link_row(samples, lane, rate, way, BAR if lane == "auto" and (way != "both" or rate == FASTEST) else None)
        for rate in RATES
        for lane in LANES
        for way in WAYS
    ]


def link_row(samples: Samples, lane: str, rate: str, way: str, bar: float | None) -> Row:
    """One direction of one lane on one link, or both."""
    own = median(samples, lane_name(lane, rate), way)
    line = median(samples, iperf_name(rate), way)
    used = sorted({str(sample["lane"]) for sample in _of(samples, lane_name(lane, rate))})
    return Row(
        work=f"{way}, {lane_name(lane, rate)}",
        value=None if own is None else own * 8 / 1e6,
        unit="Mbit/s",
        against={} if line is None else {iperf_name(rate): line * 8 / 1e6},
        ratio=own / line if own is not None and line is not None else None,
        bar=bar,
        note=f"used: {', '.join(used)}" if used else "",
    )


def _of(samples: Samples, contender: str) -> list[Sample]:
    return list(samples.get(contender, ()))
