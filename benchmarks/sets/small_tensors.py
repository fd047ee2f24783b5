"""300 tensors of 1 to 100 KB beside one tensor of the same total size, on every lane."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median

NAME = "small-tensors"
ABOUT = "300 tensors of 1 KB to 100 KB, as long as one tensor of the same total size"
TENSORS = 300
KILOBYTES = (1.0, 100.0)
TOTAL_MB = TENSORS * sum(KILOBYTES) / 2 / 1e3
LANES = ("grpc", "tcp", "shm")
BAR = 1.2


def many(lane: str) -> str:
    """Name of the contender with many tensors."""
    return f"{lane} lane, {TENSORS} tensors"


def one(lane: str) -> str:
    """Name of the contender with one."""
    return f"{lane} lane, one tensor"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    contenders: list[Contender] = []
    for lane in LANES:
        contenders.append(bench.ours(many(lane), lane=lane, tensors=TENSORS, kilobytes=KILOBYTES))
        contenders.append(bench.ours(one(lane), lane=lane, megabytes=TOTAL_MB))
    return collect(contenders, bench.scale.repeats, bench.say)


def rows(samples: Samples) -> list[Row]:
    """Time with many tensors over time with one, by lane."""
    found = []
    for lane in LANES:
        several, single = median(samples, many(lane)), median(samples, one(lane))
        found.append(
            Row(
                work=many(lane),
                value=None if several is None else 1e3 * several,
                unit="ms",
                against={} if single is None else {one(lane): 1e3 * single},
                ratio=several / single if several is not None and single is not None else None,
                bar=BAR,
                sense=AT_MOST,
            )
        )
    return found
