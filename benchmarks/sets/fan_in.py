"""1 to 8 workers with 1 Gbit/s each on one ps with 4 Gbit/s, beside as many streams of iperf3."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, median
from benchmarks.network import IPERF3_PORT, Lab, iperf3, lab
from benchmarks.process import ContenderError
from benchmarks.push_pull import run_on

NAME = "fan-in"
ABOUT = "1 to 8 workers with 1 Gbit/s each on a ps with 4 Gbit/s, beside as many streams of iperf3"
COUNTS = (1, 2, 4, 8)
FULL = 4
"""Workers that fill the ps's link."""
BAR = 0.9
RATES = "4gbit,1gbit"
PS, PORT = 1, 2222
FEWER = 2
"""So many times fewer steps than in other sets: the link is shared."""


def ours(workers: int) -> str:
    """Name of our contender."""
    return f"{workers} worker{'' if workers == 1 else 's'}"


def streams(workers: int) -> str:
    """Name of the measure."""
    return f"iperf3, {workers} stream{'' if workers == 1 else 's'} both ways"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set on a host for the ps and one for each worker."""
    try:
        with lab(1 + max(COUNTS), RATES) as hosts:
            contenders = []
            for count in COUNTS:
                contenders.append(Contender(name=ours(count), run=lambda n=count: run(bench, hosts, n)))
                contenders.append(Contender(name=streams(count), run=lambda n=count: iperf3s(bench, hosts, n)))
            return collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {ours(max(COUNTS)): str(error)}


def run(bench: Bench, hosts: Lab, workers: int) -> dict[str, Any]:
    """One run, with the bytes a second that go into the ps and out of it."""
    steps, warmup = max(1, bench.scale.steps // FEWER), bench.scale.warmup // FEWER
    found = run_on(
        bench.work(workers=workers, steps=steps, warmup=warmup),
        addresses=[f"{hosts.address(PS)}:{PORT}"],
        ps=[hosts.prefix(PS)],
        workers=[hosts.prefix(PS + 1 + index) for index in range(workers)],
    )
    return {**found, "bytes_per_s": 2e6 * found["megabytes"] * workers / found["median_s"]}


def iperf3s(bench: Bench, hosts: Lab, workers: int) -> dict[str, Any]:
    """A stream between the ps's host and each worker's, all at once, both ways."""

    def one(index: int) -> float:
        return iperf3(hosts, PS + 1 + index, PS, bench.scale.link_seconds, both=True, port=IPERF3_PORT + index)

    with ThreadPoolExecutor(workers) as pool:
        return {"bytes_per_s": sum(pool.map(one, range(workers)))}


def rows(samples: Samples) -> list[Row]:
    """What goes through the ps's link over what iperf3 moves there."""
    return [row(samples, count) for count in COUNTS]


def row(samples: Samples, count: int) -> Row:
    """One number of workers; a bar where they can fill the link."""
    own, line = (median(samples, name, "bytes_per_s") for name in (ours(count), streams(count)))
    return Row(
        work=f"{ours(count)}: through the ps's link, both ways",
        value=None if own is None else own * 8 / 1e6,
        unit="Mbit/s",
        against={} if line is None else {streams(count): line * 8 / 1e6},
        ratio=own / line if own is not None and line is not None else None,
        bar=BAR if count >= FULL else None,
        note="" if count >= FULL else "reported",
    )
