"""2 and 4 synchronous workers on one host, beside a gloo all-reduce of as many processes."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect, gloo
from benchmarks.figures import Row, Samples, speed_row

NAME = "workers"
ABOUT = "2 and 4 synchronous workers on one host, automatic lane, beside gloo"
COUNTS = (2, 4)
BAR = 1.3


def ours(workers: int, *, zero_copy: bool = False) -> str:
    """Name of our contender."""
    return f"{workers} workers, automatic lane" + (", tensors of the session" if zero_copy else "")


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    contenders: list[Contender] = []
    for count in COUNTS:
        contenders.append(bench.ours(ours(count), workers=count))
        contenders.append(bench.ours(ours(count, zero_copy=True), workers=count, zero_copy=True))
        if bench.scale.peers:
            contenders.append(gloo(count).contender(bench, bench.scale.megabytes))
    return collect(contenders, bench.scale.repeats, bench.say)


def rows(samples: Samples) -> list[Row]:
    """Steps per second over gloo's."""
    names = [(count, ours(count, zero_copy=zero_copy)) for count in COUNTS for zero_copy in (False, True)]
    return [speed_row(samples, name, name, [gloo(count).name], BAR) for count, name in names]
