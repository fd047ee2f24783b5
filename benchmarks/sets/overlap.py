"""A model whose backward takes as long as its communication on a 1 Gbit/s link: the step with and without overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cluster import Model, alone, on_hosts, train
from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median
from benchmarks.network import Lab, lab
from benchmarks.process import ContenderError
from benchmarks.push_pull import run_on

NAME = "overlap"
ABOUT = "1 worker, 1 ps, 1 Gbit/s: backward as long as communication, with and without overlap"
COMPUTE, COMMUNICATION = "forward + backward alone", "push + pull alone"
WITH, WITHOUT = "overlap", "no overlap"
BAR = 1.25
LAYERS = 8
PORT = 2222
TRIALS = (64, 256)
"""Batch sizes from which the right one is found."""


def batch_for(target_s: float, trials: dict[int, float]) -> int:
    """The batch whose backward takes `target_s`, on the straight line through two trials (batch -> seconds)."""
    (low, low_s), (high, high_s) = sorted(trials.items())
    slope = (high_s - low_s) / (high - low)
    if slope <= 0.0:
        raise ContenderError(
            f"backward took {low_s:.3f} s with a batch of {low} and {high_s:.3f} s with {high}: the machine is too busy"
        )
    return max(1, round(low + (target_s - low_s) / slope))


def model_of(bench: Bench) -> Model:
    """The model, with a batch that is found later."""
    width = max(64, int((bench.scale.megabytes * 1e6 / 4 / LAYERS) ** 0.5) // 64 * 64)
    return Model(width=width, layers=LAYERS, batch=TRIALS[0], steps=bench.scale.steps, warmup=bench.scale.warmup)


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    try:
        with lab(2, "1gbit") as hosts:
            return collect(contenders(bench, hosts), bench.scale.repeats, bench.say)
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {WITH: str(error)}


def contenders(bench: Bench, hosts: Lab) -> list[Contender]:
    """Both parts alone, and the whole twice; the batch is found first, once."""
    model = model_of(bench)

    def communicate() -> dict[str, Any]:
        return run_on(
            bench.work(tensors=LAYERS, megabytes=model.megabytes),
            addresses=[f"{hosts.address(1)}:{PORT}"],
            ps=[hosts.prefix(1)],
            workers=[hosts.prefix(2)],
        )

    target_s = float(communicate()["median_s"])
    few = min(5, bench.scale.steps)
    trials = {batch: float(alone(replace(model, batch=batch, steps=few))["backward_s"]) for batch in TRIALS}
    model = replace(model, batch=batch_for(target_s, trials))
    bench.say(f"    communication takes {1e3 * target_s:.0f} ms; with a batch of {model.batch} so does backward")
    places = on_hosts(hosts)
    return [
        Contender(name=COMMUNICATION, run=communicate),
        Contender(name=COMPUTE, run=lambda: _compute(model)),
        Contender(name=WITH, run=lambda: train(model, places, overlap=True)),
        Contender(name=WITHOUT, run=lambda: train(model, places, overlap=False)),
    ]


def _compute(model: Model) -> dict[str, Any]:
    found = alone(model)
    # The optimizer's step is the server's in a cluster.
    return {**found, "median_s": found["forward_s"] + found["backward_s"]}


def rows(samples: Samples) -> list[Row]:
    """The step over the longer of its two parts."""
    parts = {name: median(samples, name) for name in (COMPUTE, COMMUNICATION)}
    known = {name: value for name, value in parts.items() if value is not None}
    found = []
    for name, bar in ((WITH, BAR), (WITHOUT, None)):
        step_s = median(samples, name)
        found.append(
            Row(
                work=f"step with {name}",
                value=None if step_s is None else 1e3 * step_s,
                unit="ms",
                against={part: 1e3 * value for part, value in known.items()},
                ratio=step_s / max(known.values()) if step_s is not None and len(known) == len(parts) else None,
                bar=bar,
                sense=AT_MOST,
                note="" if bar else "reported",
            )
        )
    return found
