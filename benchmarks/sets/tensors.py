"""How the work of each phase of a job grows with the number of its tensors, in processor seconds of all processes."""

from __future__ import annotations

import functools
import math
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Contender, collect
from benchmarks.figures import AT_MOST, Row, Samples, median
from benchmarks.process import HERE, ROOT, Prefix, timed
from benchmarks.tensors_job import STAMPS, TENSORS
from shardline.observability.counting import plural

NAME = "tensors"
ABOUT = "how the work of each phase of a job grows with its tensors: 100, 1,000 and 10,000 of three elements"
CONSTANT = 1
"""Tensors of the job whose seconds are the constant that each phase has."""
STEPS = 20
BAR = 1.2
LEAST = 0.05
"""Part of the constant that counts as the growth where less was measured, since it is as large as the noise."""
PHASES = {
    "first_s": "from the command to the first step",
    "step_s": "a step",
    "end_s": "from the last step to the exit, with the last checkpoint",
    "resume_s": "from the command to the first step of a resumed run",
    "export_s": "export",
}
JOB = ROOT / "benchmarks" / "tensors_job.py"


def named(tensors: int) -> str:
    """Name of a contender."""
    return plural(tensors, "tensor")


def measure(bench: Bench) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run the set."""
    contenders = [
        Contender(name=named(size), run=functools.partial(lived, size, bench.loopback.prefix))
        for size in (CONSTANT, *bench.scale.tensors)
    ]
    return collect(contenders, bench.scale.repeats, bench.say)


def lived(tensors: int, prefix: Prefix = HERE) -> dict[str, Any]:
    """Processor seconds of each phase of one job: trained, resumed for as many steps again, and exported."""
    with tempfile.TemporaryDirectory(prefix="shardline-bench-") as name:
        folder = Path(name)
        train = ["train", str(JOB), "--ps", "2", "--workers", "2", "--no-page", "--out", str(folder / "out")]

        def run(number: int, *words: str) -> tuple[list[float], float]:
            """Processor seconds that a command had used before each forward pass, and at its end."""
            stamps = folder / f"stamps-{number}"
            before_s = _children_s()
            timed([*prefix, sys.executable, "-m", "shardline", *words], {TENSORS: str(tensors), STAMPS: str(stamps)})
            notes = stamps.read_text(encoding="utf-8").split() if stamps.exists() else []
            return sorted(map(float, notes)), _children_s() - before_s

        passes, whole_s = run(1, *train, "--steps", str(STEPS))
        again, _ = run(2, *train, "--steps", str(2 * STEPS), "--resume")
        _, export_s = run(3, "export", str(folder / "out"), str(folder / "model.pt"))
    return {
        "tensors": tensors,
        "first_s": passes[0],
        "step_s": (passes[-1] - passes[0]) / STEPS,
        "end_s": whole_s - passes[-1],
        "resume_s": again[0],
        "export_s": export_s,
    }


def _children_s() -> float:
    """Processor seconds of this process's children that ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def exponent(constant_s: float, small: tuple[int, float], large: tuple[int, float]) -> float:
    """Slope between two sizes, given as (tensors, seconds), of the seconds beyond the constant, both on a log scale."""
    least_s = LEAST * constant_s
    grown = [max(least_s, seconds - constant_s) for _, seconds in (small, large)]
    return math.log(grown[1] / grown[0]) / math.log(large[0] / small[0])


def rows(samples: Samples) -> list[Row]:
    """The exponent of each phase between the two largest sizes."""
    sizes = sorted({int(sample["tensors"]) for found in samples.values() for sample in found} - {CONSTANT})
    return [row(samples, phase, sizes) for phase in PHASES]


def row(samples: Samples, phase: str, sizes: Sequence[int]) -> Row:
    """The exponent of one phase; the seconds at each size stand in the note."""
    found = {size: median(samples, named(size), phase) for size in (CONSTANT, *sizes)}
    seconds = {size: value for size, value in found.items() if value is not None}
    value = None
    if CONSTANT in seconds and len(seconds) > 2:
        small, large = sorted(seconds)[-2:]
        value = exponent(seconds[CONSTANT], (small, seconds[small]), (large, seconds[large]))
    return Row(
        work=PHASES[phase],
        value=value,
        unit="exponent",
        ratio=value,
        bar=BAR,
        sense=AT_MOST,
        note="; ".join(f"{named(size)} {amount:.3g} s" for size, amount in seconds.items()),
    )
