"""1 worker + 1 ps on one host beside the same training with no cluster: a small model that computes for long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.cluster import Model, alone, on_one_host, train
from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median
from benchmarks.process import ContenderError
from benchmarks.sets.overlap import TRIALS, batch_for

NAME = "overhead"
ABOUT = "1 worker + 1 ps on one host beside the same training with no cluster"
CLUSTER, ALONE = "1 worker + 1 ps", "no cluster"
BAR = 1.05
COMPUTE_S = 0.25
"""Forward and backward of one step on one thread; at least 0.2 is asked for."""
LEAST_COMPUTE_S = 0.2
MOST_MB = 8.0


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    prefix = bench.loopback.prefix
    model = Model(width=512, layers=6, batch=TRIALS[0], steps=bench.scale.steps, warmup=bench.scale.warmup)
    try:
        trials = {}
        for batch in (1024, 4096):
            found = alone(replace(model, batch=batch, steps=3), prefix)
            trials[batch] = float(found["forward_s"] + found["backward_s"])
        model = replace(model, batch=batch_for(COMPUTE_S, trials))
    except ContenderError as error:
        bench.say(f"  {error}")
        return {}, {CLUSTER: str(error)}
    bench.say(f"    {model.megabytes:.1f} MB, a batch of {model.batch} computes for {1e3 * COMPUTE_S:.0f} ms")
    contenders = [
        Contender(name=ALONE, run=lambda: _sized(model, alone(model, prefix))),
        Contender(name=CLUSTER, run=lambda: _sized(model, train(model, on_one_host(prefix)))),
    ]
    return collect(contenders, bench.scale.repeats, bench.say)


def _sized(model: Model, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "megabytes": model.megabytes}


def rows(samples: Samples) -> list[Row]:
    """Time per step over that with no cluster; no bar where the work is not what the bar is about."""
    step_s, alone_s = median(samples, CLUSTER), median(samples, ALONE)
    forward_s, backward_s = (median(samples, ALONE, name) for name in ("forward_s", "backward_s"))
    megabytes = median(samples, ALONE, "megabytes")
    computes_s = (forward_s or 0.0) + (backward_s or 0.0)
    fits = computes_s >= LEAST_COMPUTE_S and megabytes is not None and megabytes <= MOST_MB
    return [
        Row(
            work="time per step, 1 worker + 1 ps on one host",
            value=None if step_s is None else 1e3 * step_s,
            unit="ms",
            against={} if alone_s is None else {ALONE: 1e3 * alone_s},
            ratio=step_s / alone_s if step_s is not None and alone_s is not None else None,
            bar=BAR if fits else None,
            sense=AT_MOST,
            note=f"{1e3 * computes_s:.0f} ms of compute" + ("" if fits else ": the bar is about at least 200 ms"),
        )
    ]
