"""Servers beside 4 workers and on 0, 2 or 4 more hosts: shards of equal size, and by what each link has left."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, median
from benchmarks.network import Lab, iperf3, lab
from benchmarks.process import ContenderError
from benchmarks.push_pull import run_on
from shardline.core.shares import loads, shares_of

NAME = "placement"
ABOUT = "servers beside 4 workers and on 0, 2, 4 more hosts with 250 Mbit/s each: equal shards, and by the links"
WORKERS, SPARES = 4, (0, 2, 4)
RATE, PORT = "250mbit", 2222
LINE = "iperf3, one way"
SMALLER = 4
"""So many times fewer bytes than in other sets: the links are slow, so that two cores keep up with eight hosts."""
FEWER = 2
BAR = 1 / 1.1


def hosts_of(spares: int) -> tuple[list[int], list[int]]:
    """Hosts of the workers, and of the servers."""
    workers = list(range(1, WORKERS + 1))
    return workers, list(range(1, WORKERS + spares + 1))


def shares(spares: int, *, equal: bool) -> tuple[float, ...]:
    """The share of each server."""
    workers, servers = ([str(host) for host in hosts] for hosts in hosts_of(spares))
    return (1 / len(servers),) * len(servers) if equal else shares_of(servers, workers)


def ours(spares: int, *, equal: bool) -> str:
    """Name of our contender."""
    return f"{spares} more hosts, {'equal shards' if equal else 'by the links'}"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set on a host for each worker and each server beyond those."""
    try:
        with lab(WORKERS + max(SPARES), RATE) as hosts:
            contenders = [
                Contender(name=ours(spares, equal=equal), run=lambda n=spares, e=equal: run(bench, hosts, n, equal=e))
                for spares in SPARES
                for equal in (True, False)
            ]
            contenders.append(
                Contender(name=LINE, run=lambda: {"bytes_per_s": iperf3(hosts, 1, 2, bench.scale.link_seconds)})
            )
            return collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {ours(max(SPARES), equal=False): str(error)}


def run(bench: Bench, hosts: Lab, spares: int, *, equal: bool) -> dict[str, Any]:
    """One run. A server without a share is left out, as the chief does."""
    workers, servers = hosts_of(spares)
    held = [(host, share) for host, share in zip(servers, shares(spares, equal=equal), strict=True) if share]
    return run_on(
        bench.work(
            megabytes=bench.scale.megabytes / SMALLER,
            tensors=16,
            workers=WORKERS,
            ps=len(held),
            shares=tuple(share for _, share in held),
            steps=max(1, bench.scale.steps // FEWER),
            warmup=max(1, bench.scale.warmup // FEWER),
        ),
        addresses=[f"{hosts.address(host)}:{PORT}" for host, _ in held],
        ps=[hosts.prefix(host) for host, _ in held],
        workers=[hosts.prefix(host) for host in workers],
    )


def rows(samples: Samples) -> list[Row]:
    """Steps per second over those that the busiest link allows: t* of BytePS by the links."""
    return [row(samples, spares) for spares in SPARES]


def row(samples: Samples, spares: int) -> Row:
    """One number of hosts beyond those of the workers."""
    own, equal = (median(samples, ours(spares, equal=even), "median_s") for even in (False, True))
    line = median(samples, LINE, "bytes_per_s")
    size = median(samples, ours(spares, equal=False), "megabytes")
    workers, servers = ([str(host) for host in hosts] for hosts in hosts_of(spares))
    busiest = max(loads(servers, workers, shares(spares, equal=False)).values())
    floor = None if line is None or size is None else busiest * size * 1e6 / line
    return Row(
        work=f"4 workers, {spares} more hosts with a server: a step of {'?' if size is None else f'{size:.0f}'} MB",
        value=None if own is None else 1 / own,
        unit="steps/s",
        against={
            **({} if equal is None else {ours(spares, equal=True): 1 / equal}),
            **({} if floor is None else {"t* of BytePS": 1 / floor}),
        },
        ratio=None if own is None or floor is None else floor / own,
        bar=BAR,
        note="of t*",
    )
