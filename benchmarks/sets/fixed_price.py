"""A step of 10 KB, 1 worker, 1 ps on one host: what a step costs that has next to nothing to move."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median
from benchmarks.floors import floor

NAME = "fixed-price"
ABOUT = "10 KB of float32, 1 worker, 1 ps on one host, push + SGD + pull"
KILOBYTES = 10.0
LONGER = 30
"""So many times the steps of other sets: they are short."""
LANES = {"shm": 0.3, "tcp": 0.6, "grpc": None}
"""Bars in ms; None = reported only."""
FLOORS = {"shm": "unix", "tcp": "tcp"}
"""How two processes of Python exchange as many bytes with nothing else to do."""


def own(lane: str) -> str:
    """Name of our contender."""
    return f"{lane} lane, 10 KB"


def bare(kind: str) -> str:
    """Name of the floor."""
    return f"10 KB to another process and back, {kind} socket"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    steps, warmup = LONGER * bench.scale.steps, LONGER * bench.scale.warmup
    sizes = {"kilobytes": (KILOBYTES, KILOBYTES), "steps": steps, "warmup": warmup}
    contenders = [bench.ours(own(lane), lane=lane, **sizes) for lane in LANES]
    for kind in FLOORS.values():
        contenders.append(_floor(bench, kind, steps, warmup))
    return collect(contenders, bench.scale.repeats, bench.say)


def _floor(bench: Bench, kind: str, steps: int, warmup: int) -> Contender:
    flags = ("--kind", kind, "--kilobytes", KILOBYTES, "--steps", steps, "--warmup", warmup)
    name = bare(kind)
    return Contender(name=name, run=lambda: floor(bench.loopback.prefix, name, "exchange", *flags))


def rows(samples: Samples) -> list[Row]:
    """Milliseconds a step by lane."""
    return [row(samples, lane, bar) for lane, bar in LANES.items()]


def row(samples: Samples, lane: str, bar: float | None) -> Row:
    """One lane. The bar is one of the time itself; the floor stands beside it."""
    taken = median(samples, own(lane))
    value = None if taken is None else 1e3 * taken
    note = "" if bar else "reported"
    if lane in FLOORS and (least := median(samples, bare(FLOORS[lane]))) is not None:
        note = f"{bare(FLOORS[lane])}: {1e3 * least:.3f} ms"
    return Row(work=own(lane), value=value, unit="ms", ratio=value, bar=bar, sense=AT_MOST, note=note)
