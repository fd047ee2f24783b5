"""Pipelines whose passes wait instead of computing: bubbles beside the formula, rates beside the longest stage's.

And a mixed pipeline beside a sequential one: layers as long as those of a transformer with few large blocks between an
embedding and an output layer of half a block's length each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_LEAST, AT_MOST, Row, Samples, median, speed_row
from benchmarks.simulated import Pass, Run, passes, real, staged
from shardline_pipeline import Flush, bubble
from shardline_pipeline.partition.choose import mixed
from shardline_pipeline.partition.costs import Cluster, Costs, LinkLevel, Stages
from shardline_pipeline.partition.dynamic import candidates
from shardline_pipeline.partition.forecast import forecast_of
from shardline_pipeline.partition.profile import Handed, Layer, Profile

NAME = "bubbles"
ABOUT = "3 equal stages on a worker each, whose passes wait 90 ms per microbatch, so that cores are no limit"
STAGES, PASS_S, WIDTH = 3, 0.09, 32
FLUSHING, ASYNCHRONOUS = ("gpipe", "flush"), ("stash", "double-buffer")
MICROBATCHES = (2, 4, 8)
STEADY = 4
"""Microbatches of a step without a flush."""
WARMUP, STEPS = 4, 10
NEAR_BAR, STEADY_BAR, MIXED_BAR = 1.05, 0.9, 1.15
UNBALANCED = {"embedding": 0.03, "block 0": 0.06, "block 1": 0.06, "output": 0.03}
"""Seconds of the layers of an unbalanced model."""
SEQUENTIAL, MIXED = "sequential stages, 8 microbatches", "mixed stages, 8 microbatches"


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""

    def run(pipeline: str, microbatches: int) -> dict[str, Any]:
        steps = WARMUP + STEPS + 1
        job = staged(pipeline, STAGES, microbatches, steps=steps, mean_s=PASS_S, cv=0.0, width=WIDTH)
        with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
            out = Path(folder) / "run"
            real(job, out)
            return figures([one for one in passes(out) if step_of(one) >= WARMUP])

    shapes = [(name, count) for name in FLUSHING for count in MICROBATCHES] + [(name, STEADY) for name in ASYNCHRONOUS]
    contenders = [
        Contender(name=name_of(*shape), run=lambda shape=shape: run(*shape))  # type: ignore[misc]
        for shape in shapes
    ]
    for name, plan in plans().items():
        contenders.append(Contender(name=name, run=lambda plan=plan: planned(plan)))  # type: ignore[misc]
    return collect(contenders, bench.scale.repeats, bench.say)


def plans() -> dict[str, Stages]:
    """What `shardline partition` finds for the unbalanced model, with and without --mixed."""
    handed = (Handed(dtype="float32", shape=(1, WIDTH), needs_grad=True),)
    layers = [
        Layer(name=name, forward_s=s / 3, backward_s=2 * s / 3, handed=handed, trained_bytes=4 * WIDTH * WIDTH)
        for name, s in UNBALANCED.items()
    ]
    costs = Costs(
        profile=Profile(layers=tuple(layers), samples=1),
        cluster=Cluster(levels=(LinkLevel(count=STAGES),)),
        schedule=Flush(),
        microbatches=MICROBATCHES[-1],
    )
    plans = list(candidates(costs, copies=1))
    sequential = min(plans, key=lambda plan: forecast_of(costs, plan).seconds)
    found = mixed(costs, STAGES, also=plans)
    assert found is not None
    return {SEQUENTIAL: sequential, MIXED: found}


def planned(plan: Stages) -> dict[str, Any]:
    """A run of a plan, each stage on its worker."""
    run = Run(
        name="planned",
        workers=STAGES,
        steps=WARMUP + STEPS + 1,
        width=WIDTH,
        cv=0.0,
        layers=tuple(UNBALANCED.values()),
        cuts=tuple(stage.first for stage in plan[1:]),
        homes=tuple(stage.workers[0] for stage in plan),
        pipeline="flush",
        microbatches=MICROBATCHES[-1],
    )
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        out = Path(folder) / "run"
        real(run, out)
        return figures([one for one in passes(out) if step_of(one) >= WARMUP])


def figures(found: Sequence[Pass]) -> dict[str, Any]:
    """Of passes: seconds per step, the longest stage's seconds of computing per step, and the mean bubble. Pure."""
    steps = {step: list(own) for step, own in groupby(sorted(found, key=step_of), step_of)}
    starts = [min(one["ts"] for one in own) for own in steps.values()]
    # The last step only says when the one before it is over.
    whole = list(steps.values())[:-1]
    stages = {one["args"]["stage"] for one in found}
    busy = [sum(one["dur"] for own in whole for one in own if one["args"]["stage"] == stage) for stage in stages]
    bubbles = [
        1 - sum(one["dur"] for one in own) / len(stages) / (max(one["ts"] + one["dur"] for one in own) - start)
        for own, start in zip(whole, starts, strict=False)
    ]
    return {
        "median_s": (starts[-1] - starts[0]) / 1e6 / len(whole),
        "longest_s": max(busy) / 1e6 / len(whole),
        "bubble": fmean(bubbles),
        "steps": len(whole),
    }


def step_of(one: Pass) -> int:
    """The step of a pass."""
    return int(one["args"]["step"])


def name_of(pipeline: str, microbatches: int) -> str:
    """A contender."""
    return f"{pipeline}, {microbatches} microbatches"


def rows(samples: Samples) -> list[Row]:
    """Bubbles over the formula's, and steps/s over those of the longest stage that computes without a pause."""
    found = [_near(samples, name, count) for name in FLUSHING for count in MICROBATCHES]
    found += [_steady(samples, name_of(name, STEADY)) for name in ASYNCHRONOUS]
    return [*found, speed_row(samples, MIXED, MIXED, [SEQUENTIAL], MIXED_BAR)]


def _near(samples: Samples, pipeline: str, microbatches: int) -> Row:
    value, formula = median(samples, name_of(pipeline, microbatches), "bubble"), bubble(STAGES, microbatches)
    return Row(
        work=f"bubble of {name_of(pipeline, microbatches)}",
        value=None if value is None else 100 * value,
        unit="%",
        against={"(n - 1) / (m + n - 1)": 100 * formula},
        ratio=None if value is None else value / formula,
        bar=NEAR_BAR,
        sense=AT_MOST,
    )


def _steady(samples: Samples, name: str) -> Row:
    step_s, longest_s = median(samples, name), median(samples, name, "longest_s")
    return Row(
        work=f"steady state of {name}",
        value=None if step_s is None else 1 / step_s,
        unit="steps/s",
        against={} if longest_s is None else {"the longest stage alone": 1 / longest_s},
        ratio=longest_s / step_s if longest_s is not None and step_s is not None else None,
        bar=STEADY_BAR,
        sense=AT_LEAST,
    )
