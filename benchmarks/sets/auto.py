"""Codec auto beside raw bytes where these are cheap: its choice must not cost anything."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.cluster import Model, Places, on_hosts, on_one_host, train
from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import Row, Samples, speed_row
from benchmarks.network import lab
from benchmarks.process import ContenderError

NAME = "auto"
ABOUT = "a job of 25 MB with a chief: what codec auto chooses beside raw bytes, over 1 Gbit/s and on one host"
BAR = 0.97
WIDTH, LAYERS, BATCH = 1024, 6, 64
LAST = 20
"""Steps that count: the chief measures and chooses in those before."""
LINK, HOST = "1 Gbit/s", "one host"
PASSES = {LINK: 140, HOST: 500}
"""Enough to measure for 10 seconds, start over and reach the last steps."""


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    quick = bench.scale.steps < LAST
    model = Model(width=WIDTH, layers=LAYERS, batch=BATCH, steps=bench.scale.steps, warmup=bench.scale.warmup)

    def contenders(where: str, places: Places) -> list[Contender]:
        return [
            Contender(name=_name(where, codec), run=lambda codec=codec: _run(model, places, where, codec, quick=quick))
            for codec in ("raw", "auto")
        ]

    samples, missing = collect(contenders(HOST, on_one_host(bench.loopback.prefix)), bench.scale.repeats, bench.say)
    try:
        with lab(2, "1gbit") as hosts:
            more, lacking = collect(contenders(LINK, on_hosts(hosts)), bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        more, lacking = {}, {_name(LINK, "auto"): str(error)}
    return {**samples, **more}, {**missing, **lacking}


def _name(where: str, codec: str) -> str:
    return f"{codec}, {where}"


def _run(model: Model, places: Places, where: str, codec: str, *, quick: bool) -> dict[str, Any]:
    passes = model.steps if quick else PASSES[where]
    longer = Model(width=model.width, layers=model.layers, batch=model.batch, steps=passes, warmup=model.warmup)
    found = train(longer, places, codec=codec)
    return {**found, "median_s": statistics.median(found["seconds"][-LAST:])}


def rows(samples: Samples) -> list[Row]:
    """Steps per second over those of raw bytes."""
    return [
        speed_row(samples, f"auto, {where}", _name(where, "auto"), [_name(where, "raw")], BAR) for where in (LINK, HOST)
    ]
