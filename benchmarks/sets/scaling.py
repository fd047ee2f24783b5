"""2 ps beside 1 ps with 2 workers, every host on a link of 1 Gbit/s."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.network import Lab, lab
from benchmarks.process import ContenderError
from benchmarks.push_pull import Work, run_on

NAME = "scaling"
ABOUT = "2 ps x 2 workers beside 1 ps x 2 workers on 1 Gbit/s links"
ONE, TWO = "1 ps x 2 workers", "2 ps x 2 workers"
BAR = 1.8
WORKERS = 2
PORT = 2222


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set on four hosts: two for ps, two for workers."""
    try:
        with lab(4, "1gbit") as hosts:
            contenders = [
                Contender(name=name, run=lambda ps=ps: run_hosts(bench.work(ps=ps, workers=WORKERS), hosts))
                for name, ps in ((ONE, 1), (TWO, 2))
            ]
            return collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {TWO: str(error)}


def run_hosts(work: Work, hosts: Lab) -> dict[str, Any]:
    """One run: ps on hosts 1 and 2, workers on hosts 3 and 4."""
    servers = range(1, work.ps + 1)
    workers = range(3, work.workers + 3)
    return run_on(
        work,
        addresses=[f"{hosts.address(host)}:{PORT}" for host in servers],
        ps=[hosts.prefix(host) for host in servers],
        workers=[hosts.prefix(host) for host in workers],
    )


def rows(samples: Samples) -> list[Row]:
    """Steps per second with two ps over those with one."""
    return [speed_row(samples, TWO, TWO, [ONE], BAR)]
