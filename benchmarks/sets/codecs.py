"""Codecs beside raw bytes: 2 workers and a server, each on a link of its own."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.network import Lab, lab
from benchmarks.process import ContenderError
from benchmarks.push_pull import Work, run_on

NAME = "codecs"
ABOUT = "25 MB, 2 workers, 1 ps, each host on a link of 100 Mbit/s: codecs beside raw bytes"
MEGABYTES = 25.0
WORKERS = 2
STEPS = 5
"""A step of raw bytes takes some seconds."""
PORT = 2222
RAW = "raw"
CHOICES: dict[str, tuple[str, str, float]] = {
    "bf16": ("bf16", "bf16", 1.9),
    "int8, down as changes": ("int8", "delta:by=int8", 3.5),
    "onebit, down as changes": ("onebit", "delta:by=onebit", 12.0),
    "topk 1 %, down as changes": ("topk", "delta:by=topk", 15.0),
}
"""By name: codec of gradients, of parameters, and the bar."""


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set on three hosts."""
    try:
        with lab(1 + WORKERS, "100mbit") as hosts:
            chosen = {RAW: ("raw", ""), **{name: choice[:2] for name, choice in CHOICES.items()}}
            contenders = [
                Contender(
                    name=name,
                    run=lambda up=up, down=down: run_hosts(
                        bench.work(
                            megabytes=MEGABYTES,
                            workers=WORKERS,
                            codec=up,
                            codec_down=down,
                            steps=min(STEPS, bench.scale.steps),
                            warmup=2,
                        ),
                        hosts,
                    ),
                )
                for name, (up, down) in chosen.items()
            ]
            return collect(contenders, bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, dict.fromkeys(CHOICES, str(error))


def run_hosts(work: Work, hosts: Lab) -> dict[str, Any]:
    """One run: the ps on host 1, the workers on the others."""
    return run_on(
        work,
        addresses=[f"{hosts.address(1)}:{PORT}"],
        ps=[hosts.prefix(1)],
        workers=[hosts.prefix(2 + index) for index in range(work.workers)],
    )


def rows(samples: Samples) -> list[Row]:
    """Steps per second over those of raw bytes."""
    return [speed_row(samples, name, name, [RAW], bar) for name, (_, _, bar) in CHOICES.items()]
