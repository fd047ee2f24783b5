"""64 MB of float32, 1 worker, 1 ps on one host: push + SGD + pull, our lanes beside the rivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import RAY, RPC_SHM, RPC_TCP, TENSORFLOW, Bench, Contender, collect, rivals
from benchmarks.figures import AT_MOST, Row, Sample, Samples, median, speed_row
from benchmarks.floors import floor

NAME = "data-plane"
ABOUT = "64 MB of float32, 1 worker, 1 ps on one host, push + SGD + pull"

GRPC = "grpc lane"
TCP = "tcp lane"
ZERO_COPY = "shm lane, tensors of the session"
ORDINARY = "shm lane, ordinary tensors"
TLS = "tcp lane with TLS"

NETWORK_RIVALS = (TENSORFLOW, RPC_TCP)
HOST_RIVALS = (RPC_SHM, RAY, TENSORFLOW)
SMALL_MB = 8.0
"""Smaller models lie in the processor's caches, and have bars of their own."""
FLOOR = "memory floor"
FLOOR_BAR = 1.5


@dataclass(frozen=True)
class Comparison:
    """Whom a lane is compared with, and the bars; None = reported only."""

    rivals: tuple[str, ...]
    bar: float | None = None
    small: float | None = None
    """For a small model, where it is another."""

    def bar_at(self, megabytes: float) -> float | None:
        """The bar for a model of this size."""
        return self.small if self.small is not None and megabytes < SMALL_MB else self.bar


LANES: Mapping[str, Comparison] = {
    GRPC: Comparison(NETWORK_RIVALS, 1.0),
    TCP: Comparison(NETWORK_RIVALS, 1.15, small=1.2),
    ZERO_COPY: Comparison(HOST_RIVALS, 3.0),
    ORDINARY: Comparison(HOST_RIVALS, 1.5, small=2.0),
    TLS: Comparison(NETWORK_RIVALS),
}


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


def memory_floor(bench: Bench, megabytes: float) -> Contender:
    """What reading and writing that much memory takes, on all cores."""
    flags = ("memory", "--megabytes", megabytes, "--steps", bench.scale.steps, "--warmup", bench.scale.warmup)
    return Contender(name=FLOOR, run=lambda: floor(bench.loopback.prefix, FLOOR, *flags))


def contenders(bench: Bench, megabytes: float, *, whole: bool = True) -> list[Contender]:
    """Ours, the floor and the rivals, each rival at its best and, where `whole`, with one call a step too."""
    found = [*lanes(bench, megabytes), memory_floor(bench, megabytes)]
    if bench.scale.peers:
        for rival in rivals().values():
            found += [rival.contender(bench, megabytes)]
            found += [rival.contender(bench, megabytes, whole=True)] if whole else []
    return found


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    return collect(contenders(bench, bench.scale.megabytes), bench.scale.repeats, bench.say)


def rows(samples: Samples) -> list[Row]:
    """The lanes at the size of this set, then against rivals with one call a step, without a bar."""
    found = rows_at(samples, lambda name: name)
    for name, compared in LANES.items():
        whole = tuple(one_call(rival) for rival in compared.rivals)
        found.append(speed_row(samples, f"{name}, rivals with one call a step", name, whole, None, note="reported"))
    return found


def rows_at(samples: Samples, named: Callable[[str], str], megabytes: float = 64.0) -> list[Row]:
    """A row per lane against the rivals at their best; zero-copy against the floor; processor time.

    named: what a contender is called in `samples`.
    """
    found = []
    for name, compared in LANES.items():
        bar = compared.bar_at(megabytes)
        rivals = [named(rival) for rival in compared.rivals]
        found.append(speed_row(samples, named(name), named(name), rivals, bar, note="" if bar else "reported"))
    found.append(floor_row(samples, named(ZERO_COPY), named(FLOOR), None if megabytes < SMALL_MB else FLOOR_BAR))
    return found + [processor_row(samples, named(name)) for name in LANES]


def floor_row(samples: Samples, own: str, least: str, bar: float | None) -> Row:
    """Time of a step over that of the floor."""
    taken, floor_s = median(samples, own), median(samples, least)
    return Row(
        work=f"{own}: beside the memory floor",
        value=None if taken is None else 1e3 * taken,
        unit="ms",
        against={} if floor_s is None else {least: 1e3 * floor_s},
        ratio=taken / floor_s if taken is not None and floor_s is not None else None,
        bar=bar,
        sense=AT_MOST,
        note="" if bar else "reported",
    )


def processor_row(samples: Samples, own: str) -> Row:
    """Processor seconds of worker and ps for 1 GB that goes through the ps: gradients in, parameters out."""
    measured = {own: [{"s_per_gb": _seconds_per_gb(sample)} for sample in samples.get(own, ())]}
    value = median(measured, own, "s_per_gb")
    return Row(work=f"{own}: processor time", value=value, unit="s/GB", note="reported")


def _seconds_per_gb(sample: Sample) -> float:
    return sum(sample["cpu_s_per_step"].values()) / (2 * float(sample["megabytes"]) / 1e3)
