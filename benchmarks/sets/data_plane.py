"""64 MB of float32, 1 worker, 1 ps on one host: push + SGD + pull, our lanes beside the rivals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.contenders import RAY, RPC_SHM, RPC_TCP, TENSORFLOW, Bench, Contender, collect, rivals
from benchmarks.figures import Row, Samples, speed_row

NAME = "data-plane"
ABOUT = "64 MB of float32, 1 worker, 1 ps on one host, push + SGD + pull"

GRPC = "grpc lane"
TCP = "tcp lane"
ZERO_COPY = "shm lane, tensors of the session"
ORDINARY = "shm lane, ordinary tensors"
TLS = "tcp lane with TLS"

NETWORK_RIVALS = (TENSORFLOW, RPC_TCP)
HOST_RIVALS = (RPC_SHM, RAY, TENSORFLOW)
BARS: Mapping[str, tuple[tuple[str, ...], float | None]] = {
    GRPC: (NETWORK_RIVALS, 1.0),
    TCP: (NETWORK_RIVALS, 1.8),
    ZERO_COPY: (HOST_RIVALS, 3.0),
    ORDINARY: (HOST_RIVALS, 1.5),
    TLS: (NETWORK_RIVALS, None),
}
"""Contender: whom it is compared with, and the bar."""


def one_call(rival: str) -> str:
    """Name of a rival that moves the tensor whole, as the work is described."""
    return f"{rival}, one call"


def lanes(bench: Bench, megabytes: float) -> list[Contender]:
    """Our contenders."""
    return [
        bench.ours(GRPC, lane="grpc", megabytes=megabytes),
        bench.ours(TCP, lane="tcp", megabytes=megabytes),
        bench.ours(ZERO_COPY, lane="shm", zero_copy=True, megabytes=megabytes),
        bench.ours(ORDINARY, lane="shm", megabytes=megabytes),
        bench.ours(TLS, lane="tcp", megabytes=megabytes, tls=True),
    ]


def contenders(bench: Bench, megabytes: float, *, whole: bool = True) -> list[Contender]:
    """Ours and the rivals, each rival at its best and, where `whole`, with one call a step too."""
    found = lanes(bench, megabytes)
    if bench.scale.peers:
        for rival in rivals().values():
            found += [rival.contender(bench, megabytes)]
            found += [rival.contender(bench, megabytes, whole=True)] if whole else []
    return found


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    return collect(contenders(bench, bench.scale.megabytes), bench.scale.repeats, bench.say)


def rows(samples: Samples) -> list[Row]:
    """One row per lane against the rivals at their best, then the same against one call a step, without a bar."""
    found = [
        speed_row(samples, name, name, names, bar, note="" if bar else "reported")
        for name, (names, bar) in BARS.items()
    ]
    for name, (names, _) in BARS.items():
        whole = tuple(one_call(rival) for rival in names)
        found.append(speed_row(samples, f"{name}, rivals with one call a step", name, whole, None, note="reported"))
    return found
