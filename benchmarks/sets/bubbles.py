"""Pipelines whose passes wait instead of computing: bubbles beside the formula, rates beside the longest stage's."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_LEAST, AT_MOST, Row, Samples, median
from benchmarks.process import ROOT, ContenderError, environment
from shardline.pipeline import bubble

NAME = "bubbles"
ABOUT = "3 equal stages on a worker each, whose passes wait 90 ms per microbatch, so that cores are no limit"
STAGES, PASS_S = 3, 0.09
FLUSHING, UNBROKEN = ("gpipe", "flush"), ("stash", "double-buffer")
MICROBATCHES = (2, 4, 8)
STEADY = 4
"""Microbatches of a step without a flush."""
WARMUP, STEPS = 4, 10
NEAR_BAR, STEADY_BAR = 1.05, 0.9
Pass = dict[str, Any]


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""

    def run(pipeline: str, microbatches: int) -> dict[str, Any]:
        return figures(passes(pipeline, microbatches, bench.loopback.prefix))

    shapes = [(name, count) for name in FLUSHING for count in MICROBATCHES] + [(name, STEADY) for name in UNBROKEN]
    contenders = [
        Contender(name=name_of(*shape), run=lambda shape=shape: run(*shape))  # type: ignore[misc]
        for shape in shapes
    ]
    return collect(contenders, bench.scale.repeats, bench.say)


def passes(pipeline: str, microbatches: int, prefix: Sequence[str]) -> list[Pass]:
    """The passes of the steps after the warm-up, by start, from the trace of a run. Raises ContenderError."""
    fields = {"pipeline": pipeline, "accumulate": microbatches, "steps": WARMUP + STEPS + 1}
    job = [str(ROOT / "benchmarks" / "simulated_job.py"), "--", "--stages", str(STAGES), "--mean", str(PASS_S)]
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as folder:
        out = Path(folder) / "run"
        command = [*prefix, sys.executable, "-m", "shardline", "train", "--workers", str(STAGES), "--out", str(out)]
        command += [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
        done = subprocess.run(
            [*command, *job, "--cv", "0", "--width", "32"],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment(),
            check=False,
        )
        if done.returncode:
            raise ContenderError(f"shardline train ended with code {done.returncode}: {done.stderr[-1000:]}")
        events = json.loads((out / "pipeline-trace.json").read_text(encoding="utf-8"))["traceEvents"]
    kept = range(WARMUP, WARMUP + STEPS + 1)
    found = [one for one in events if one["ph"] == "X" and step_of(one) in kept]
    return sorted(found, key=lambda one: float(one["ts"]))


def figures(found: Sequence[Pass]) -> dict[str, Any]:
    """Of passes: seconds per step, the longest stage's seconds of computing per step, and the mean bubble. Pure."""
    steps = {step: list(own) for step, own in groupby(sorted(found, key=step_of), step_of)}
    starts = [min(one["ts"] for one in own) for own in steps.values()]
    # The last step only says when the one before it is over.
    whole = list(steps.values())[:-1]
    busy = [sum(one["dur"] for own in whole for one in own if one["args"]["stage"] == stage) for stage in range(STAGES)]
    bubbles = [
        1 - sum(one["dur"] for one in own) / STAGES / (max(one["ts"] + one["dur"] for one in own) - start)
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
    return [*found, *(_steady(samples, name_of(name, STEADY)) for name in UNBROKEN)]


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
